"""Makes sure that the BMC powers the host on when AC returns, and proves it by reading back.

The power restore policy as last read without an outage: what `bmc.policy: bracket` puts back after one.

In a file, as the daemon that puts it back may be another one than the one that has set always-on: killed in between, it
could not know what it had found. If the file is absent or damaged, the policy is unknown.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Action, Detail, EnsurePolicy, RestorePolicy
from powerguard.durable import replace_file
from powerguard.effectors.bmc.engine import BACK_OFF_S, BmcError, Engine, Ensured, Probe, Refusals, hasten
from powerguard.effectors.bmc.inband import InbandEngine
from powerguard.effectors.bmc.ipmi import ChassisStatus, Failure, PowerRestorePolicy
from powerguard.effectors.bmc.lan import WORKER, LanEngine
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.options import BmcOptions

log = structlog.get_logger(__name__)

FILE: Final = "bmc-policy.json"
_LIMIT_S: Final = 0.5
"""Timeout for the file, so that a hung disk leaves time for the BMC."""
_MAX_BYTES: Final = 4096


class FoundPolicy:
    """Keeps it. folder: the daemon's own; None: only in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / FILE
        self._known: PowerRestorePolicy | None = None
        self._on_disk: PowerRestorePolicy | None = None

    async def read(self) -> PowerRestorePolicy | None:
        """Return it; None if unknown. Never raises."""
        if self._known is None and self._path is not None:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    self._known = self._on_disk = await asyncio.to_thread(_read, self._path)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                self._doubt("bmc_policy_unreadable", error)
        return self._known

    async def write(self, found: PowerRestorePolicy) -> None:
        """Keep it, on disk where it is another one. Never raises."""
        self._known = found
        if self._path is None or found is self._on_disk:
            return
        content = json.dumps({"schema_version": 1, "policy": found.value}).encode() + b"\n"
        try:
            async with asyncio.timeout(_LIMIT_S):
                await asyncio.to_thread(replace_file, self._path, content)
            self._on_disk = found
        except OSError as error:  # of which TimeoutError is one
            self._doubt("bmc_policy_unwritten", error)

    def _doubt(self, event: str, error: Exception) -> None:
        because = f"no answer in {_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)[:200]
        log.warning(event, path=str(self._path), because=because)


def _read(path: Path) -> PowerRestorePolicy | None:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    return PowerRestorePolicy(record["policy"])


__all__ = ["BACK_OFF_S", "WORKER", "BmcEffector", "BmcError", "Failure", "Probe"]

_T = TypeVar("_T")
_NONE: Final = (
    "bmc.kind is none, so it is not certain that this host powers on when power returns; "
    "give it its BMC (bmc: {kind: auto}, or {kind: ipmi-lan, host: ..., user: ..., password: ...})"
)
_ANSWER_MARGIN_S: Final = 0.1
"""Time before the action's deadline at which the effector ends, so that it can report what it saw."""


class BmcEffector:
    """Carries out `EnsurePolicy` and `RestorePolicy`, through the engine that the settings name.

    Kind auto: the first that verifies it.

    limit_s: of one operation, all engines together; a caller that cancels earlier ends it, with every process of it.
    clock: seconds of CLOCK_BOOTTIME; times the operations and the rest after a refused login. folder: the daemon's
    own, where bmc.policy: bracket keeps what it is to put back. dry_run: that it only observes is not the site's wish.
    refusals: the logins that were refused before a reload of the settings.
    """

    def __init__(
        self,
        options: BmcOptions,
        *,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
        limit_s: float = 5.0,
        folder: Path | None = None,
        dry_run: bool = False,
        refusals: Refusals | None = None,
    ) -> None:
        self._options = options
        self._dry_run = dry_run
        self._refusals = {} if refusals is None else refusals
        self._engines = _engines(options, spawn, clock, self._refusals)
        self._clock = clock
        self._limit_s = limit_s
        self._found = FoundPolicy(folder)
        self._watts_engine: Engine | None = None

    async def carry_out(self, action: Action) -> Detail:
        """Ensure or put back a policy, by reading back. Raises BmcError unless what was read is what was asked for.

        Returns policy, verified, before, changed, power_on, ac_failed (None: not reported), engine and latency_s;
        earlier: why engines before it failed, where any did. For an EnsurePolicy also restore: the policy to put back
        after the outage, if bmc.policy is bracket and it was another (a failure reports it as well: a policy that was
        set and could not be read back is in force); without an outage power_watts, if the BMC reports it.
        """
        began_s = self._clock()
        limit_s = min(self._limit_s, action.by_s - began_s - _ANSWER_MARGIN_S)
        match action:
            case EnsurePolicy():
                return await self._verify(action, began_s, limit_s)
            case RestorePolicy():
                return await self._put_back(action, began_s, limit_s)
            case _:
                msg = f"the bmc effector carries out EnsurePolicy and RestorePolicy, not {type(action).__name__}"
                raise TypeError(msg)

    async def _verify(self, action: EnsurePolicy, began_s: float, limit_s: float) -> Detail:
        """Ensure (policy: ensure), ensure for an outage (bracket) or only verify (observe) always-on.

        Raises BmcError unless always-on was read from the BMC; with bracket and no outage: unless it could be set.
        """
        bracket = self._options.policy == "bracket"
        if action.outage:
            hasten(self._refusals)
        ask = _able if bracket and not action.outage else _look if self._options.policy == "observe" else _ensure
        try:
            engine, ensured, earlier = await self._first(ask, limit_s)
        except BmcError as error:
            if bracket and action.outage:
                detail = error.detail + _restore(await self._found.read())
                raise BmcError(str(error), error.failure, detail=detail) from error
            raise
        status = ensured.after
        if self._options.policy == "observe" and status.policy is not PowerRestorePolicy.ALWAYS_ON:
            why = f"{engine.where}: power restore policy is {status.policy}, so this host stays off when power returns"
            right = "set it to always-on, or set bmc.policy: ensure (it is observe)"
            msg = f"{why}; {'in mode rehearse or armed the daemon sets it to always-on' if self._dry_run else right}"
            raise BmcError(msg).having_read(status.policy)
        detail = self._detail(engine, ensured, earlier, began_s)
        if bracket and action.outage:
            # If it is set already, an engine that failed may have set it, or a daemon that was killed after that.
            detail += _restore(ensured.before.policy if ensured.changed else await self._found.read())
        elif bracket:
            await self._found.write(status.policy)
        if not action.outage and (watts := await self._watts(engine, limit_s - (self._clock() - began_s))) is not None:
            detail += (("power_watts", watts),)
        return detail

    async def _put_back(self, action: RestorePolicy, began_s: float, limit_s: float) -> Detail:
        """Put back what an outage found, but only over the always-on that we have set in it (bmc.policy: bracket)."""
        if self._options.policy != "bracket":
            msg = (
                f"bmc.policy is now {self._options.policy}, so the policy from before the outage ({action.policy}) is "
                "not put back: set it by hand if you want it"
            )
            raise BmcError(msg, Failure.SETTINGS, harmless=True)
        wanted = _of_word(action.policy)
        engine, ensured, earlier = await self._first(lambda engine, by_s: engine.put_back(wanted, by_s), limit_s)
        found = ensured.after.policy
        if ensured.changed and found is not wanted:
            msg = f"{engine.where}: {wanted} was put back, but it reads {found}"
            raise BmcError(msg, Failure.MISMATCH)
        await self._found.write(found)  # a check between the outage and this has found the one of the outage
        return self._detail(engine, ensured, earlier, began_s)

    def _detail(self, engine: Engine, ensured: Ensured, earlier: tuple[str, ...], began_s: float) -> Detail:
        status = ensured.after
        more: Detail = (("earlier", "; ".join(earlier)),) if earlier else ()
        return (
            ("policy", status.policy.value),
            ("verified", True),
            ("before", ensured.before.policy.value),
            ("changed", ensured.changed),
            ("power_on", status.power_on),
            ("ac_failed", status.ac_failed),
            ("engine", engine.kind),
            ("latency_s", round(self._clock() - began_s, 3)),
            *more,
        )

    async def power_watts(self, limit_s: float) -> float | None:
        """The host's power draw, as its BMC measures it; None if unknown. Never raises: it is optional."""
        # The engine that answered last has all the time: a BMC that takes 4 s to answer is no reason to pass it over.
        engines = self._engines if self._watts_engine is None else (self._watts_engine,)
        self._watts_engine = None
        for engine in engines:
            watts = await self._watts(engine, limit_s / len(engines))
            if watts is not None:
                self._watts_engine = engine
                return watts
        return None

    async def _watts(self, engine: Engine, limit_s: float) -> float | None:
        try:
            return await engine.power_watts(boottime_s() + limit_s) if limit_s > 0 else None
        except BmcError:
            return None

    async def account_level(self, limit_s: float) -> int | None:
        """Privilege of powerguard's account; None if unknown, or if it does not log in over LAN. Never raises."""
        lan = next((engine for engine in self._engines if isinstance(engine, LanEngine)), None)
        try:
            return None if lan is None else await lan.account_level(boottime_s() + limit_s)
        except BmcError:  # another engine has answered already: this is optional
            return None

    async def status(self, limit_s: float) -> ChassisStatus:
        """Read the chassis status within limit_s. Raises BmcError."""
        return (await self._first(lambda engine, by_s: engine.status(by_s), limit_s))[1]

    async def probe(self, limit_s: float) -> Probe:
        """Read status, support and restart cause within limit_s. Raises BmcError.

        With policy: observe the support is not asked for: the question is a form of the set command.
        """
        ask_support = self._options.policy != "observe"
        return (await self._first(lambda engine, by_s: engine.probe(by_s, ask_support=ask_support), limit_s))[1]

    async def why_on(self, limit_s: float) -> Probe:
        """Read what powered this host on and whether AC had failed before, for the story of an outage. Raises BmcError.

        An engine that reports neither (Redfish) is skipped, so it may be another engine than the one of the policy.
        """
        return (await self._first(_why_on, limit_s))[1]

    async def _first(
        self, ask: Callable[[Engine, float], Awaitable[_T]], limit_s: float
    ) -> tuple[Engine, _T, tuple[str, ...]]:
        """Ask one engine after the other; the first that does not fail counts. Returns also why earlier ones failed.

        Each gets an equal share of the time that is left, so a dead one takes no later one's.
        """
        if not self._engines:
            raise BmcError(_NONE)
        by_s = boottime_s() + limit_s  # the engines' own clock, also where ours is a simulated one
        failed: list[BmcError] = []
        for number, engine in enumerate(self._engines):
            now_s = boottime_s()
            if now_s >= by_s:
                failed.append(BmcError(f"{engine.where}: not asked, because no time was left", Failure.TIMEOUT))
                continue
            try:
                result = await ask(engine, now_s + (by_s - now_s) / (len(self._engines) - number))
            except BmcError as error:
                failed.append(error)
            else:
                return engine, result, self._reasons(failed)
        if len(failed) == 1:
            raise failed[0]
        msg = f"no engine could verify it: {'; '.join(self._reasons(failed))}"
        read = next((error.detail for error in failed if error.detail), ())
        raise BmcError(msg, failed[-1].failure, detail=read)

    def _reasons(self, failed: list[BmcError]) -> tuple[str, ...]:
        return tuple(f"{engine.kind}: {error}" for engine, error in zip(self._engines, failed, strict=False))


def _restore(found: PowerRestorePolicy | None) -> Detail:
    """Report the policy to put back after the outage; none if it is unknown or was always-on."""
    puts_back = found in (PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE)
    return (("restore", found.value),) if found is not None and puts_back else ()


def _of_word(word: str) -> PowerRestorePolicy:
    """Return the policy that `restore` names. Raises BmcError."""
    for policy in (PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE):
        if policy == word:
            return policy
    msg = f"{word[:40]!r} is not a policy that an outage could have changed: no policy is put back"
    raise BmcError(msg, Failure.SETTINGS, harmless=True)


async def _ensure(engine: Engine, by_s: float) -> Ensured:
    return await engine.ensure(PowerRestorePolicy.ALWAYS_ON, by_s)


async def _look(engine: Engine, by_s: float) -> Ensured:
    """Read only. Raises BmcError if the BMC reports no policy; another engine may."""
    status = await engine.status(by_s)
    if status.policy is PowerRestorePolicy.UNKNOWN:
        msg = f"{engine.where}: reports no power restore policy, so it is unknown whether this host would power on"
        raise BmcError(msg, Failure.UNSUPPORTED)
    return Ensured(before=status, after=status, changed=False)


async def _able(engine: Engine, by_s: float) -> Ensured:
    """Could always-on be set when an outage comes? Raises BmcError unless the BMC reports that it could."""
    seen = await engine.probe(by_s, ask_support=True)
    wanted, policy = PowerRestorePolicy.ALWAYS_ON, seen.status.policy
    if policy is not wanted and wanted not in (seen.supported or ()):
        msg = (
            f"{engine.where}: power restore policy is {policy}, and it does not report that always-on can be set, "
            "so bmc.policy: bracket would not work: set always-on in the firmware setup, and bmc.policy: observe"
        )
        raise BmcError(msg, Failure.UNSUPPORTED).having_read(policy)
    return Ensured(before=seen.status, after=seen.status, changed=False)


async def _why_on(engine: Engine, by_s: float) -> Probe:
    """Raises BmcError if the BMC reports neither the cause of the restart nor of its last power-off."""
    seen = await engine.probe(by_s, ask_support=False)
    if seen.restart_cause is None and seen.status.ac_failed is None:
        msg = f"{engine.where}: does not report what powered this host on"
        raise BmcError(msg, Failure.UNSUPPORTED)
    return seen


def _engines(options: BmcOptions, spawn: Spawn, clock: Clock, refusals: Refusals) -> tuple[Engine, ...]:
    """Make the engines that the settings name, in the order in which they are asked."""
    made: list[Engine] = []
    if options.kind in {"in-band", "auto"}:
        made.append(InbandEngine(options.socket))
    if options.kind != "none" and options.host and options.user and options.password:
        if options.kind in {"redfish", "auto"}:
            from powerguard.effectors.bmc.redfish import RedfishEngine  # noqa: PLC0415 - 1 MB, loaded only if needed

            made.append(RedfishEngine(options, clock=clock, refusals=refusals))
        if options.kind in {"ipmi-lan", "auto"}:
            made.append(LanEngine(options, spawn=spawn, clock=clock, refusals=refusals))
    return tuple(made)
