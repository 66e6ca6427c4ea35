"""Traps and informs of all versions, read and judged. Apart from `traps`: a host without traps loads none of pysnmp.

Versions 1 and 2c need pysnmp's codec only. Version 3 has an engine of its own, which is the authority for informs.
pysnmp knows no time window for traps: one that was recorded and is sent again causes a poll, as any hint does.

- `_EngineTime` is overridden because pysnmp's engine time follows wall time
  (test_a_recorded_inform_is_answered_with_our_time_and_nothing_else).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from pysnmp.proto import api, rfc1902, rfc1905
from pysnmp.proto.error import StatusInformation

from powerguard.clock import Clock
from powerguard.options import SecretError
from powerguard.ups.profiles.vocabulary import Answer, Oid
from powerguard.ups.snmp.engine import (
    NOWHERE,
    NUMBERS,
    USM,
    V3,
    MessageError,
    User,
    UserError,
    Version3,
    community_message,
    hello,
    parameters_of,
    plain,
    read_message,
    reason_of,
)
from powerguard.ups.snmp.options import TrapUser, plain_engine

_MOST_VARBINDS: Final = 64
"""What a trap says of itself stands at its beginning or, from a relay, among the last few."""
_LONGEST_OID: Final = 128
"""Parts of an OID (RFC 2578 3.5)."""
_TRAP_OID: Final = "1.3.6.1.6.3.1.1.4.1.0"
_TRAP_ADDRESS: Final = "1.3.6.1.6.3.18.1.3.0"
_TRAP_COMMUNITY: Final = "1.3.6.1.6.3.18.1.4.0"
_GENERIC: Final = "1.3.6.1.6.3.1.1.5"
_ENTERPRISE_SPECIFIC: Final = 6
_REPORTABLE: Final = 4
_CONFIRMED: Final = rfc1905.InformRequestPDU.tagSet
_UNCONFIRMED: Final = rfc1905.SNMPv2TrapPDU.tagSet
_RESULTS: Final = {
    "UnknownEngineID": "unknown_engine",
    "UnknownSecurityName": "unknown_user",
    "AuthenticationFailure": "not_authentic",
    "AuthenticationError": "not_authentic",
    "UnsupportedSecurityLevel": "not_authentic",
    "NotInTimeWindow": "out_of_time",
    "DecryptionError": "undecipherable",
}
"""Why pysnmp refuses a message, and what the trap port calls it."""
_V1, _V2C = NUMBERS[1], NUMBERS["2c"]


class NotATrapError(MessageError):
    """A good SNMP message that is neither trap nor inform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What a trap or inform says. trap_oid: as version 2 has it, "" when it says none; confirmed: it is an inform.

    agent_address: the card as a relay names it, dotted; None without a relay. community: likewise.
    """

    trap_oid: str
    confirmed: bool
    agent_address: str | None = None
    community: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrapResult:
    """What a datagram was worth.

    result: one of `traps.RESULTS`, "hint" when it is good. community: of versions 1 and 2c; None: it is of version 3.
    ups: the UPS whose card sent it; None when the message does not say. answer: the message to send back, if any.
    engine_id: of version 3, when it is not known.
    """

    result: str
    community: bytes | None = None
    ups: str | None = None
    notification: Notification | None = None
    answer: bytes | None = None
    engine_id: bytes = b""


class TrapReceiver:
    """Reads traps and informs of all versions. Versions 1 and 2c need pysnmp's codec only, version 3 an engine.

    boots: must be higher after each start of the daemon (RFC 3414 2.2).
    """

    def __init__(self, *, engine_id: bytes, boots: int, clock: Clock) -> None:
        """Start without users."""
        self._engine_id, self._boots = engine_id, boots
        self._clock, self._began_s = clock, clock()
        self._engines: list[_TrapEngine] = []
        self._has_users = False

    def add(self, options: Iterable[TrapUser]) -> list[str]:
        """Take users in; returns what is wrong with those that cannot be. Builds an engine: for a thread."""
        problems = []
        for one in options:
            self._has_users = True
            try:
                user = User.read(one.user, one)
            except (SecretError, UserError) as error:
                problems.append(f"traps.users, {one.user}: {error}")
                continue
            engines = {bytes.fromhex(plain_engine(engine)): ups for ups, engine in one.engines.items()}
            # One name may have other passphrases on another card: such a user has an engine of its own.
            for trap_engine in self._engines:
                if user.name not in trap_engine.users:
                    break
            else:
                trap_engine = _TrapEngine(self._engine_id, self._boots, self._clock, self._began_s)
                self._engines.append(trap_engine)
            trap_engine.add(user, engines)
        return problems

    def receive(self, data: bytes) -> TrapResult:
        """Judge one datagram. Raises MessageError on what cannot be read, NotATrapError on other messages."""
        version, message = read_message(data)
        if version != V3:
            return _by_community(version, message)
        sender = bytes(parameters_of(message)[0])
        heard = (
            TrapResult(result="unknown_engine", engine_id=sender)
            if self._has_users
            else TrapResult(result="unknown_user")
        )
        for place, trap_engine in enumerate(self._engines):
            verdict = trap_engine.receive(data, message)
            if verdict.result == "hint":
                return verdict
            if not place or _RANK.index(verdict.result) > _RANK.index(heard.result):
                heard = verdict
        return heard


_RANK: Final = ("unknown_engine", "discovery", "unknown_user", "not_authentic", "undecipherable", "out_of_time")
"""Of several engines' results the one that came furthest counts."""


class _TrapEngine(Version3):
    """A pysnmp engine that is the authority for informs, and knows the engines that send traps."""

    def __init__(self, engine_id: bytes, boots: int, clock: Clock, began_s: float) -> None:
        super().__init__(expects=lambda _number: True)
        self.users: dict[str, User] = {}
        self._ups: dict[tuple[bytes, str], str | None] = {}
        self._known: set[bytes] = {engine_id}
        self._own_id = engine_id
        own_id, own_boots, own_time = self.snmp.get_mib_builder().import_symbols(
            "__SNMP-FRAMEWORK-MIB", "snmpEngineID", "snmpEngineBoots", "snmpEngineTime"
        )
        # Not by SnmpEngine(engine_id): that writes its boots into a file in /tmp.
        own_id.syntax = own_id.syntax.clone(engine_id)
        self.snmp.snmpEngineID = own_id.syntax
        own_boots.syntax = own_boots.syntax.clone(boots)
        own_time.syntax = _EngineTime(clock, began_s)

    def add(self, user: User, engines: dict[bytes, str]) -> None:
        """Add a user. engines: ids of the cards that send traps as this user, with the name of their UPS."""
        self.users[user.name] = user
        self._ups[self._own_id, user.name] = None
        user.add_to(self.snmp)
        for engine_id, ups in engines.items():
            self._known.add(engine_id)
            self._ups[engine_id, user.name] = ups
            user.add_to(self.snmp, engine_id)

    def receive(self, data: bytes, message: Any) -> TrapResult:  # noqa: ANN401 - pysnmp ships no types
        """Judge one message. Raises MessageError on what cannot be read."""
        parameters = parameters_of(message)
        sender, name = bytes(parameters[0]), bytes(parameters[3]).decode(errors="replace")
        wants_answer = bytes(message[1][2])[0] & _REPORTABLE
        if sender and sender not in self._known:
            # pysnmp would say that the user is unknown. Of a greeting it says that the engine is.
            report = self._open(hello(3, int(message[1][0])))[2] if wants_answer else None
            return TrapResult(result="unknown_engine", answer=report, engine_id=sender)
        if sender and (sender, name) not in self._ups:
            # pysnmp would remember every name that it is asked for.
            return TrapResult(result="unknown_user")
        read, failed, report = self._open(data)
        if read is not None and (not self.usm.proved or read[3] != self.users[name].level):
            return TrapResult(result="not_authentic")
        if read is not None and read[7].tagSet in {_CONFIRMED, _UNCONFIRMED}:
            heard = TrapResult(result="hint", ups=self._ups[sender, name], notification=_from_varbinds(read[7]))
            return replace(heard, answer=self._answer(read)) if heard.ups is None else heard
        result = _RESULTS.get(failed, "")
        if result == "unknown_engine":
            # A question for our engine id is how every inform begins.
            return TrapResult(result="discovery" if wants_answer and not sender else result, answer=report)
        if result:
            return TrapResult(result=result, answer=report if result == "out_of_time" else None)
        if self.usm.proved:
            msg = "neither trap nor inform"
            raise NotATrapError(msg)
        msg = "no SNMP message"
        raise MessageError(msg)

    def _open(self, data: bytes) -> tuple[Any, str, bytes | None]:
        """Read a message: what pysnmp makes of it (RFC 3412 7.2), or why it refuses it, and the Report to send."""
        self.dispatcher.sent, self.usm.proved = None, False
        read, failed = None, ""
        try:
            read = self.messages.prepare_data_elements(self.snmp, 0, NOWHERE, data)
        except StatusInformation as error:
            failed = reason_of(error)
        except Exception:  # noqa: BLE001, S110 - whatever pysnmp raises on a hostile packet: then nothing was heard
            pass
        report = self.dispatcher.sent
        if read is None or read[7].tagSet != _CONFIRMED:
            self.usm.forget_refused()
        return read, failed, report

    def _answer(self, read: Any) -> bytes | None:  # noqa: ANN401
        """Return the response to an inform; None to a trap."""
        if read[7].tagSet != _CONFIRMED:
            return None
        response = _response_to(api.PROTOCOL_MODULES[_V2C], read[7])
        arguments = (V3, USM, *read[2:7], response, read[10], read[12], {})
        self.snmp.message_dispatcher.return_response_pdu(self.snmp, *arguments)
        self.usm.forget_refused()
        return self.dispatcher.sent


class _EngineTime(rfc1902.Integer32):  # type: ignore[misc]
    """The time of our own engine, by our clock instead of wall time. pysnmp reads it through `clone`."""

    def __init__(self, clock: Clock, began_s: float) -> None:
        super().__init__(0)
        self._clock, self._began_s = clock, began_s

    def clone(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        return rfc1902.Integer32(int(self._clock() - self._began_s))


def _by_community(version: int, message: Any) -> TrapResult:  # noqa: ANN401
    """Read a trap or inform of version 1 or 2c. Raises MessageError."""
    module = api.PROTOCOL_MODULES[version]
    community, pdu = bytes(message[1]), message[2].getComponent()
    if version == _V1 and pdu.tagSet == module.TrapPDU.tagSet:
        return TrapResult(result="hint", community=community, notification=_trap_v1(pdu))
    if version == _V1 or pdu.tagSet not in {_CONFIRMED, _UNCONFIRMED}:
        msg = "neither trap nor inform"
        raise NotATrapError(msg)
    notification = _from_varbinds(pdu)
    answer = community_message(version, community, _response_to(module, pdu)) if notification.confirmed else None
    return TrapResult(result="hint", community=community, notification=notification, answer=answer)


def _response_to(module: Any, inform: Any) -> Any:  # noqa: ANN401
    """Return the response to an inform: the inform itself, as a response (RFC 3416 4.2.7)."""
    response = module.apiPDU.get_response(inform)
    module.apiPDU.set_varbinds(response, module.apiPDU.get_varbinds(inform))
    return response


def _trap_v1(pdu: Any) -> Notification:  # noqa: ANN401
    enterprise, generic, specific = str(pdu[0]), int(pdu[2]), int(pdu[3])
    if not 0 <= generic <= _ENTERPRISE_SPECIFIC or len(pdu[0]) > _LONGEST_OID:
        msg = "trap number out of range"
        raise MessageError(msg)
    named = f"{enterprise}.0.{specific}" if generic == _ENTERPRISE_SPECIFIC else f"{_GENERIC}.{generic + 1}"
    return Notification(trap_oid=named, confirmed=False, agent_address=_dotted(bytes(pdu[1].getComponent())))


def _from_varbinds(pdu: Any) -> Notification:  # noqa: ANN401
    found: dict[str, Answer] = {}
    for row in itertools.islice(pdu[3], _MOST_VARBINDS):
        found[str(row[0])] = plain(row[1])
    trap_oid, address, community = (found.get(name) for name in (_TRAP_OID, _TRAP_ADDRESS, _TRAP_COMMUNITY))
    if isinstance(trap_oid, Oid) and trap_oid.count(".") >= _LONGEST_OID:
        msg = "an OID of too many parts"
        raise MessageError(msg)
    return Notification(
        trap_oid=trap_oid if isinstance(trap_oid, Oid) else "",
        confirmed=pdu.tagSet == _CONFIRMED,
        agent_address=_dotted(address) if isinstance(address, bytes) else None,
        community=community if isinstance(community, bytes) else None,
    )


def _dotted(address: bytes) -> str | None:
    """Return an IpAddress dotted; None for 0.0.0.0, which relays and cards without an address write."""
    return None if len(address) != 4 or address == bytes(4) else ".".join(map(str, address))
