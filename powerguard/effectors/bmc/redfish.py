"""The engine `redfish`: ComputerSystem.PowerRestorePolicy (schema 1.6, 2018.3), and what vendors have in its place.

Where neither the property nor a vendor's own is there, a BIOS attribute is read if it says the same: it can be changed
only by a job that a reboot carries out, so it is never written.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from powerguard.clock import Clock, boottime_s
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import BACK_OFF_S, BmcError, Ensured, Login, Probe
from powerguard.effectors.bmc.exchange import READ_BACK_S, BmcFailure
from powerguard.effectors.bmc.ipmi import ChassisStatus, Failure, PowerRestorePolicy
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.bmc.redfish_http import Resource, Talk, basic, link, session
from powerguard.effectors.tls import Verify, verifying

ROOT: Final = "/redfish/v1/"
MAX_SYSTEMS: Final = 64

_REMEDIES: Final = {
    Failure.UNREACHABLE: "check that the BMC is powered and reachable from here, its address and https_port, and that "
    "Redfish is enabled",
    Failure.AUTH: "check bmc.user and bmc.password, and that the account may use Redfish",
    Failure.PRIVILEGE: "the account may log in but not do this: it needs the role Operator, or of a role of the "
    "vendor's the right to configure the system",
    Failure.UNSUPPORTED: "this board cannot be told over Redfish: try kind: auto, or set 'restore on AC power loss' to "
    "always on in its firmware setup",
    Failure.BUSY: "the BMC is busy (starting, or updating its firmware): it is asked again at the next check",
    Failure.TIMEOUT: "the BMC hangs or its network went away: reset the BMC if this goes on",
    Failure.MISMATCH: "the BMC did not store it, or not yet: set it in the firmware setup, and look for an update",
    Failure.PROTOCOL: "this is no Redfish service as we know them: look with curl at https://HOST/redfish/v1/",
    Failure.HELD: "see who else uses it",
    Failure.SETTINGS: "see bmc.ca, bmc.fingerprint and bmc.system (docs/guides/bmc.md)",
}


@dataclass(frozen=True, slots=True)
class Knob:
    """A property of a ComputerSystem that holds the policy. path: names from the outermost in."""

    path: tuple[str, ...]
    words: Mapping[PowerRestorePolicy, str]

    @property
    def name(self) -> str:
        """How it is called, for people."""
        return ".".join(self.path)

    def word(self, system: Mapping[str, Any]) -> object:
        """What it holds; None where it is not there."""
        told: object = system
        for name in self.path:
            told = told.get(name) if isinstance(told, Mapping) else None
        return told

    def policy(self, system: Mapping[str, Any]) -> PowerRestorePolicy:
        """What it holds, in our words."""
        word = self.word(system)
        return next((policy for policy, told in self.words.items() if told == word), PowerRestorePolicy.UNKNOWN)

    def change(self, wanted: PowerRestorePolicy) -> dict[str, Any]:
        """Body of a PATCH."""
        told: Any = self.words[wanted]
        for name in reversed(self.path):
            told = {name: told}
        return dict(told)

    def supported(self, system: Mapping[str, Any]) -> frozenset[PowerRestorePolicy]:
        """What it can be set to: what the service lists (DSP0266 9.5.2), else all that the schema knows."""
        outer: object = system
        for name in self.path[:-1]:
            outer = outer.get(name) if isinstance(outer, Mapping) else None
        listed = outer.get(f"{self.path[-1]}@Redfish.AllowableValues") if isinstance(outer, Mapping) else None
        words = listed if isinstance(listed, list) else list(self.words.values())
        return frozenset(policy for policy, word in self.words.items() if word in words)


_ON, _OFF, _LAST = PowerRestorePolicy.ALWAYS_ON, PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE
KNOBS: Final = (
    Knob(("PowerRestorePolicy",), {_ON: "AlwaysOn", _OFF: "AlwaysOff", _LAST: "LastState"}),
    # HPE iLO 5 and 6 (their reference of ComputerSystem, and recorded services).
    Knob(("Oem", "Hpe", "PowerAutoOn"), {_ON: "PowerOn", _OFF: "RemainOff", _LAST: "Restore"}),
)

# Attributes of a Bios resource, in lower case without what is no letter, and their values likewise. Dell up to iDRAC 9:
# AcPwrRcvry; Supermicro: "Restore on AC Power Loss", with some generations' suffixes. Not seen on hardware by us.
_BIOS_NAMES: Final = ("acpwrrcvry", "restoreonacpowerloss")
_BIOS_WORDS: Final = {
    "on": _ON,
    "poweron": _ON,
    "alwayson": _ON,
    "off": _OFF,
    "stayoff": _OFF,
    "alwaysoff": _OFF,
    "last": _LAST,
    "laststate": _LAST,
}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A system as read. knob: None where it has none of ours; then `bios` tells the attribute that was read instead."""

    system: Resource
    knob: Knob | None
    policy: PowerRestorePolicy
    bios: str = ""

    def status(self) -> ChassisStatus:
        power = self.system.body.get("PowerState")
        return ChassisStatus(power_on=power == "On" if isinstance(power, str) else None, policy=self.policy)

    def unsupported(self) -> BmcFailure:
        if self.bios:
            text = f"{self.bios}, and such a BIOS attribute changes only with a reboot: it is read, never written"
        else:
            text = f"{self.system.path} has none of {', '.join(knob.name for knob in KNOBS)}"
        return BmcFailure(Failure.UNSUPPORTED, text)


class RedfishEngine:
    """Redfish over HTTPS. Verified by its certificate authority, or by the fingerprint of its own certificate."""

    kind = "redfish"

    def __init__(self, options: BmcOptions, *, clock: Clock = boottime_s) -> None:
        """options: of a kind that needs host, user and password. clock: for the rest after a refused login."""
        if options.host is None or options.user is None or options.password is None:
            msg = "redfish needs host, user and password"
            raise ValueError(msg)
        self._host = options.host
        self._options = options
        self._login = Login(options.user, options.password, clock=clock)
        self._verify: Verify | None = None

    async def ensure(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        return await self._set(wanted, by_s, None)

    async def put_back(self, wanted: PowerRestorePolicy, by_s: float) -> Ensured:
        return await self._set(wanted, by_s, PowerRestorePolicy.ALWAYS_ON)

    async def power_watts(self, by_s: float) -> float | None:  # noqa: ARG002 - not asked: see docs/guides/bmc.md
        return None

    async def _set(self, wanted: PowerRestorePolicy, by_s: float, only_over: PowerRestorePolicy | None) -> Ensured:
        async with self._talk(by_s) as talk:
            seen = await self._look(talk)
            before = seen.status()
            if seen.policy is wanted or seen.policy is not (only_over or seen.policy):
                return Ensured(before=before, after=before, changed=False)
            knob = seen.knob
            if knob is None:
                raise seen.unsupported()
            if wanted not in knob.supported(seen.system.body):
                raise BmcFailure(Failure.UNSUPPORTED, f"{knob.name} cannot be set to {knob.words[wanted]}")
            await talk.patch(seen.system, knob.change(wanted))
            waited_s, found = 0.0, PowerRestorePolicy.UNKNOWN
            for at_s in READ_BACK_S:
                if at_s and not await talk.pause(at_s - waited_s):
                    break
                waited_s = at_s
                seen = _seen(await talk.get(seen.system.path))
                found = seen.policy
                if found is wanted:
                    return Ensured(before=before, after=seen.status(), changed=True)
            text = f"acknowledged {wanted} but still reads {found} {waited_s:g} s later"
            raise self._error(Failure.MISMATCH, text).having_read(found)

    async def status(self, by_s: float) -> ChassisStatus:
        async with self._talk(by_s) as talk:
            return (await self._look(talk)).status()

    async def probe(self, by_s: float, *, ask_support: bool) -> Probe:  # noqa: ARG002 - the answer costs no question
        """Redfish tells what is supported without being asked, and of the cause of a restart nothing."""
        async with self._talk(by_s) as talk:
            seen = await self._look(talk)
        supported = frozenset() if seen.knob is None else seen.knob.supported(seen.system.body)
        return Probe(status=seen.status(), supported=supported, restart_cause=None)

    @property
    def where(self) -> str:
        """Which BMC, for people."""
        return f"BMC {self._host} port {self._options.https_port}"

    def _error(self, failure: Failure, seen: str) -> BmcError:
        return BmcError(f"{self.where}: {seen}; {_REMEDIES[failure]}", failure)

    async def _look(self, talk: Talk) -> _Seen:
        """Find the one system that is ours, and read it; a BIOS only where nothing else tells."""
        root = await talk.get(ROOT, login=False)
        systems = await talk.get(link(root.body, "Systems"))
        seen = _seen(await talk.get(self._chosen(systems)))
        if seen.knob is None and "Bios" in seen.system.body:
            return _with_bios(seen, (await talk.get(link(seen.system.body, "Bios"))).body)
        return seen

    def _chosen(self, systems: Resource) -> str:
        """Path of the one system, or of the one that the settings name: never guessed. Raises BmcFailure."""
        members = systems.body.get("Members")
        told = [each for each in members if isinstance(each, Mapping)] if isinstance(members, list) else []
        paths = [link(each) for each in told[:MAX_SYSTEMS]]
        names = {path.rstrip("/").rpartition("/")[2]: path for path in paths}
        known = ", ".join([*names][:8]) or "none"
        # One of a list that goes on elsewhere (DSP0266 7.5.2) is not the only one.
        count = systems.body.get("Members@odata.count")
        is_all = not isinstance(count, int) or count <= len(paths)
        wanted = self._options.system
        if wanted is not None:
            if wanted not in names:
                raise BmcFailure(Failure.SETTINGS, f"bmc.system is {wanted}, and there is: {known}")
            return names[wanted]
        if len(paths) == 1 and is_all:
            return paths[0]
        if not paths:
            raise BmcFailure(Failure.UNSUPPORTED, f"{systems.path} lists no system")
        raise BmcFailure(
            Failure.SETTINGS, f"has several systems, and none is guessed: set bmc.system to one of {known}"
        )

    @asynccontextmanager
    async def _talk(self, by_s: float) -> AsyncIterator[Talk]:
        """Hold one operation to its deadline, and tell its failures. Raises BmcError and nothing else."""
        password = await self._login.password(by_s)
        self._login.check_back_off(self.where, password, _REMEDIES[Failure.AUTH])
        talk: Talk | None = None
        try:
            async with asyncio.timeout(max(by_s - boottime_s(), 0.0)):
                async with session(await self._verifying()) as open_session:
                    authorization = basic(self._login.user, password)
                    talk = Talk(open_session, self._host, self._options.https_port, authorization, by_s)
                    yield talk
        except TimeoutError:
            if talk is None or not talk.heard:
                raise self._error(Failure.UNREACHABLE, "no answer") from None
            raise self._error(Failure.TIMEOUT, f"answered, then fell silent during {talk.doing}") from None
        except BmcFailure as failed:
            text = str(failed)
            if failed.failure is Failure.AUTH:
                self._login.refuse(password)
                text += f", not tried again for {BACK_OFF_S / 60:g} minutes"
            raise self._error(failed.failure, text) from None

    async def _verifying(self) -> Verify:
        """What proves that it is our BMC. Raises BmcError."""
        if self._verify is None:
            try:
                self._verify = await verifying("bmc", self._options.fingerprint, self._options.ca)
            except EffectorError as error:
                raise BmcError(str(error), Failure.SETTINGS) from None
        return self._verify


def _seen(system: Resource) -> _Seen:
    for knob in KNOBS:
        if knob.word(system.body) is not None:
            return _Seen(system, knob, knob.policy(system.body))
    return _Seen(system, None, PowerRestorePolicy.UNKNOWN)


def _with_bios(seen: _Seen, bios: Mapping[str, Any]) -> _Seen:
    attributes = bios.get("Attributes")
    for name, value in attributes.items() if isinstance(attributes, Mapping) else ():
        if _letters(name).startswith(_BIOS_NAMES) and isinstance(value, str):
            policy = _BIOS_WORDS.get(_letters(value), PowerRestorePolicy.UNKNOWN)
            return _Seen(seen.system, None, policy, f"BIOS attribute {name[:80]} reads {value[:80]!r}")
    return seen


def _letters(told: str) -> str:
    return "".join(c for c in told.lower() if "a" <= c <= "z")
