"""The drill of the BMC's watchdog: arm it, power the host off in order, and judge the result at the next boot.

It is the only drill that ends in a power-off, so it is not part of the core: it runs outside of any outage, and its
record is in a file that is written before the timer is armed (docs/decisions/0150).
"""

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from powerguard.clock import Clock, boottime_s
from powerguard.core.drill import checks
from powerguard.core.model.actions import Action, ArmPowerOn, Detail, Grade, Level, Note, PowerOff, PowerOnMethod
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import State
from powerguard.daemon.attempt import rest
from powerguard.daemon.observe.status import SCHEMA_VERSION, Json
from powerguard.daemon.systemd import is_host_stopping
from powerguard.effectors.base import Effector, EffectorError, PowerOnEffector
from powerguard.effectors.child import Spawn

if TYPE_CHECKING:  # loaded only if needed, to save the daemon's memory
    from powerguard.effectors.bmc.engine import WatchdogStatus
    from powerguard.effectors.bmc.watchdog import DrillRecord, WatchdogEffector

OFF_S: Final = 60.0
"""Time from the forced power-off to the timer. The host must have been off for a while, or the drill is no evidence."""
STILL_HERE_S: Final = 30.0
"""Time after the forced power-off at which a host that still runs counts as not powered off; its timer is stopped."""
EARLY_S: Final = 10.0
LATE_S: Final = 900.0
"""A start before the timer, or this long after it, has another cause; firmware takes minutes."""
JUDGE_AFTER_S: Final = 90.0
"""Since the boot: by then the clock has been set."""
OUTPUT_OFF: Final = Path("/etc/powerguard/output-off")
"""The site's program that the last step of a power-off runs (systemd/powerguard-shutdown)."""
_LIMIT_S: Final = 5.0
_ASK_AGAIN_S: Final = 10.0
_ASKS: Final = 60


class DrillDaemon(Protocol):
    """The drill's view of the daemon: of `port.Daemon`, its journal, and a check of the power-on methods."""

    @property
    def boot_id(self) -> str: ...
    @property
    def host_kind(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def state(self) -> State: ...
    @property
    def clock(self) -> Clock: ...
    def wall(self) -> float: ...
    def note(self, note: Note) -> None: ...
    def check_soon(self) -> None: ...


class WatchdogDrill:
    """Begins a drill, and judges the one of the boot before. effectors: those of the moment, as settings may change.

    host_name: what the operator has to repeat. pause: waits; real in the daemon, fast in tests. output_off: where the
    site's program is.
    """

    def __init__(
        self,
        host: DrillDaemon,
        effectors: Callable[[], Mapping[type[Action], Effector]],
        *,
        spawn: Spawn,
        host_name: Callable[[], str] = socket.gethostname,
        pause: Callable[[float], Awaitable[object]] = rest,
        output_off: Path = OUTPUT_OFF,
    ) -> None:
        self._host = host
        self._effectors = effectors
        self._spawn = spawn
        self._host_name = host_name
        self._pause = pause
        self._output_off = output_off
        self._begun = asyncio.Event()
        self._underway = False
        self._judging = False

    # --- Beginning -----------------------------------------------------------------------------------------------

    async def plan(self) -> Json:
        """Return what would happen, why it may not now (`refused`, "" when it may), and how the last one went."""
        refused, last = "", None
        try:
            last = await self._watchdog().last()
            await self._check()
        except EffectorError as error:
            refused = str(error)
        return {
            "schema_version": SCHEMA_VERSION,
            "object": "watchdog_drill_plan",
            "mode": self._host.policy.mode.value,
            "host": self._host_name(),
            "refused": refused,
            "force_after_s": self._force_s,
            "in_s": self._in_s,
            "last": None if last is None else asdict(last),
        }

    async def begin(self, who: str, host_name: str) -> float:
        """Write down, arm, read back, power off; returns the seconds until the timer fires. Raises EffectorError.

        host_name: as the operator has typed it. A failure undoes the steps so far, but for an order without an answer.
        """
        if not self._host.policy.powers_off:
            msg = f"mode is {self._host.policy.mode}: this drill powers the host off and needs mode: armed"
            raise EffectorError(msg)
        if host_name != self._host_name():
            msg = f"{host_name!r} is not this host's name: it is {self._host_name()}"
            raise EffectorError(msg)
        watchdog, seen = await self._check()
        if self._underway:
            msg = "this drill is already running"
            raise EffectorError(msg)
        self._underway = True
        try:
            return await self._begin(watchdog, seen, who)
        except BaseException:
            self._underway = self._begun.is_set()
            raise

    async def _begin(self, watchdog: "WatchdogEffector", seen: "WatchdogStatus", who: str) -> float:
        from powerguard.effectors.bmc.watchdog import DrillRecord  # noqa: PLC0415 - loaded only if needed

        drill = DrillRecord(
            state="pending",
            board=watchdog.board(seen),
            boot_id=self._host.boot_id,
            armed_wall_s=self._host.wall(),
            in_s=self._in_s,
            because=f"begun by {who}",
        )
        await watchdog.store(drill)
        try:
            left_s = await watchdog.arm(self._in_s, self._by_s())
            numbers = ("in_s", left_s), ("board", drill.board.name)
            self._note("watchdog_drill_armed", f"begun by {who}", Level.WARNING, numbers)
            self._may_begin()  # The file and the BMC have taken seconds, and the power may have failed meanwhile.
            order = PowerOff(
                id=f"{self._host.boot_id[:8]}-watchdog-drill",
                by_s=self._host.clock() + _LIMIT_S,
                outage="",
                grade=Grade.FULL,
                force_after_s=self._force_s,
            )
            detail = await self._effectors()[PowerOff].carry_out(order)
        except BaseException as error:
            if isinstance(error, EffectorError) and error.timed_out:
                # The word may still be obeyed, and the host would stay off without the timer. `run` stops it otherwise.
                self._begun.set()
                msg = f"{error}; the order may still be obeyed, so the BMC's timer stays armed: it is stopped if this "
                msg += f"host is still on in {self._force_s + STILL_HERE_S:.0f} s"
                raise EffectorError(msg, timed_out=True) from error
            await self._take_back(watchdog, drill, f"it did not start: {error}")
            raise
        because = f"drill of the BMC's watchdog, begun by {who}"
        self._note("power_off_ordered", because, Level.WARNING, (*detail, ("force_after_s", self._force_s)))
        self._begun.set()
        return left_s

    async def _check(self) -> "tuple[WatchdogEffector, WatchdogStatus]":
        """Check that it may begin, and that the BMC's timer is free. Raises EffectorError."""
        watchdog = self._watchdog()
        self._may_begin()
        seen = await watchdog.look(self._by_s())
        watchdog.board(seen)
        return watchdog, seen

    def _may_begin(self) -> None:
        """Check that it may begin by what the daemon knows now. Raises EffectorError."""
        host = self._host
        refused = checks.refusal(host.policy, host.state, host.clock(), ("policy",), "simulated")
        refused = refused or checks.unsaved(host.state, host.clock())
        if not refused and host.host_kind != "systemd":
            refused = f"host.kind is {host.host_kind}: only powerguard-off (systemd) is sure to be done by then"
        if not refused and os.access(self._output_off, os.F_OK):
            refused = (
                f"the last step of this power-off would run {self._output_off}, which switches the UPS's output off, "
                "with all that it feeds: move that file away until the drill is over"
            )
        if not refused and self._judging:
            refused = "the last drill is not judged yet, and judging stops the timer: repeat this in a few minutes"
        if refused:
            raise EffectorError(refused)

    @property
    def _force_s(self) -> float:
        return self._host.policy.force_after_s

    @property
    def _in_s(self) -> float:
        return math.ceil(self._force_s + OFF_S)

    def _by_s(self) -> float:
        return boottime_s() + _LIMIT_S  # the BMC's own clock, also where the daemon's is a simulated one

    def _watchdog(self) -> "WatchdogEffector":
        from powerguard.effectors.bmc.watchdog import WatchdogEffector  # noqa: PLC0415 - loaded only if needed

        methods = self._effectors().get(ArmPowerOn)
        found = methods.of(PowerOnMethod.WATCHDOG) if isinstance(methods, PowerOnEffector) else None
        if not isinstance(found, WatchdogEffector):
            msg = "bmc.watchdog is not set: write bmc: {kind: auto, watchdog: true}, reload, and repeat the drill"
            raise EffectorError(msg)
        return found

    # --- Judging -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Judge the drill of the boot before; then handle those of this boot. Never ends."""
        while True:
            await self._settle()
            await self._begun.wait()
            self._begun.clear()
            await self._pause(self._force_s + STILL_HERE_S)
            self._underway = False

    async def _settle(self) -> None:
        """End a pending drill, if its result is known by now."""
        methods = self._effectors().get(ArmPowerOn)
        if not isinstance(methods, PowerOnEffector) or methods.of(PowerOnMethod.WATCHDOG) is None:
            return
        watchdog = self._watchdog()
        try:
            drill = await watchdog.last()
            if drill is None or drill.state != "pending":
                return
            if drill.boot_id != self._host.boot_id:
                self._judging = True
                await self._judge(watchdog, drill)
            elif not await is_host_stopping(self._spawn):
                await self._take_back(watchdog, drill, "the host was not powered off after it")
        except EffectorError as error:
            self._note("watchdog_drill_unjudged", str(error), Level.ERROR)
        finally:
            self._judging = False

    async def _judge(self, watchdog: "WatchdogEffector", drill: "DrillRecord") -> None:
        """Ask the BMC what brought the host back, record it, and stop a timer that is still armed."""
        await self._pause(max(0.0, JUDGE_AFTER_S - self._host.clock()))
        because = ""
        for _ in range(_ASKS):
            try:
                seen = await watchdog.read(self._by_s())
                because = drill.board.unlike(watchdog.board(seen))
                break
            except EffectorError as error:
                problem = str(error)
            await self._pause(_ASK_AGAIN_S)
        else:
            await self._end(watchdog, drill, passed=False, because=f"the BMC could not be asked: {problem}")
            return
        boot_wall_s = self._host.wall() - self._host.clock()
        passed, why = verdict(drill, seen, boot_wall_s)
        if because:
            passed, why = False, f"board or firmware changed in between: {because}"
        try:
            await self._end(watchdog, drill, passed=passed, because=why)
        finally:
            with contextlib.suppress(EffectorError):
                await watchdog.disarm(self._by_s())

    async def _end(self, watchdog: "WatchdogEffector", drill: "DrillRecord", *, passed: bool, because: str) -> None:
        judged = drill.judged(passed=passed, because=because, wall_s=self._host.wall())
        level = Level.INFO if passed else Level.ERROR
        self._note("watchdog_drill_judged", because, level, (("passed", passed),))
        await watchdog.store(judged)
        self._host.check_soon()  # the state of this method in `status` and `doctor` has just changed

    def _note(self, event: str, because: str, level: Level, numbers: Detail = ()) -> None:
        self._host.note(Note(event=event, because=because, level=level, numbers=numbers))

    async def _take_back(self, watchdog: "WatchdogEffector", drill: "DrillRecord", because: str) -> None:
        """Stop the timer of a host that still runs, even if the file cannot be written."""
        try:
            await watchdog.disarm(self._by_s())
        except EffectorError as error:
            because = f"{because}; and the timer could not be stopped, so this host may be power-cycled: {error}"
        with contextlib.suppress(EffectorError):
            await self._end(watchdog, drill, passed=False, because=because)


def verdict(drill: "DrillRecord", seen: "WatchdogStatus", boot_wall_s: float) -> tuple[bool, str]:
    """Return whether the timer has brought the host back, and why. boot_wall_s: Unix seconds of the boot.

    By the cause of the restart; if the BMC does not report one, by its flag that the timer has fired, which outlives a
    power cycle (IPMI 2.0 section 27.7). And by the time: a host that was switched on before, or long after it, is not
    evidence.
    """
    from powerguard.effectors.bmc.ipmi import RestartCause  # noqa: PLC0415 - loaded only if needed

    cause = seen.restart_cause
    after_s = boot_wall_s - (drill.armed_wall_s + drill.in_s)
    is_reported = cause not in (None, RestartCause.UNKNOWN)
    fired = cause is RestartCause.WATCHDOG if is_reported else seen.timer.expired is True
    evidence = f"restart cause {cause}" if is_reported else "the BMC reports no restart cause; its timer has " + (
        "fired" if fired else "not fired"
    )  # fmt: skip
    if not fired:
        return False, f"{evidence}: once the host is off, this board's watchdog does not bring it back"
    if after_s < -EARLY_S:
        return False, f"{evidence}, but this boot began {-after_s:.0f} s before the timer would have fired"
    if after_s > LATE_S:
        return False, f"{evidence}, but this boot began {after_s / 60:.0f} minutes after the timer had fired"
    return True, f"{evidence}; this boot began {max(after_s, 0.0):.0f} s after the timer had fired"
