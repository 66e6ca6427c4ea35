"""Version 3 of traps and informs: the receiver's side of the user security model (RFC 3414 3.2).

pysnmp's own receiver (7.1.30, measured) keeps 240 bytes for ever of each message with a wrong digest and 1500 of each
engine id that somebody makes up, hands on what has neither user nor digest, and takes the time of every message for the
sender's. Here is remembered only what the settings name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from powerguard.clock import Clock
from powerguard.options import SecretError
from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_v3 as codec
from powerguard.protocols.snmp_ber import MessageError
from powerguard.protocols.snmp_trap import NotATrapError, Notification, notification_of
from powerguard.protocols.snmp_v3 import ScopedPdu, UsmMessage
from powerguard.sources.snmp_usm import WINDOW_S, EngineClock, Keys, UndecipherableError, User, UserError
from powerguard.sources.trap_options import TrapUser, plain_engine

_NOBODY: Final = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a message was worth.

    result: one of trap_counts.RESULTS, "hint" when it is good. ups: whose card sent it; None when its engine does not
    say, as in every inform. answer: what to send back; None: nothing.
    """

    result: str
    ups: str | None = None
    notification: Notification | None = None
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Sender:
    """A user on one engine. ups: whose card that is; None: it is our own engine, and the sender may be any card."""

    ups: str | None
    keys: Keys
    clock: EngineClock = field(default_factory=EngineClock)


class Usm:
    """The users of the settings, and the engine that we are to those who send informs.

    boots: must be higher after each start of the daemon (RFC 3414 2.2).
    """

    def __init__(self, *, engine_id: bytes, boots: int, clock: Clock) -> None:
        """Know nobody yet."""
        self._engine_id = engine_id
        self._boots = boots
        self._clock = clock
        self._began_s = clock()
        self._senders: dict[bytes, list[_Sender]] = {engine_id: []}
        self._unknown_engines = 0
        self._not_in_time = 0

    def add(self, options: Iterable[TrapUser]) -> list[str]:
        """Take users in; returns what is wrong with those that cannot be. Hashes a megabyte each: for a thread."""
        problems = []
        for one in options:
            try:
                user = User.read(one.user, one)
            except (SecretError, UserError) as error:
                problems.append(f"traps.users, {one.user}: {error}")
                continue
            engines: dict[bytes, str | None] = {self._engine_id: None}
            engines |= {bytes.fromhex(plain_engine(engine)): ups for ups, engine in one.engines.items()}
            for engine, ups in engines.items():
                self._senders.setdefault(engine, []).append(_Sender(ups, user.keys(engine)))
        return problems

    def receive(self, message: UsmMessage) -> Verdict:
        """Judge one message. Raises MessageError on what cannot be read."""
        if message.engine_id not in self._senders:
            self._unknown_engines += 1
            wants_answer = message.flags & codec.REPORTABLE
            told = self._report(codec.UNKNOWN_ENGINE, self._unknown_engines, message) if wants_answer else None
            # A question for our engine id is how every inform begins.
            return Verdict(
                result="discovery" if wants_answer and not message.engine_id else "unknown_engine", answer=told
            )
        named = [one for one in self._senders[message.engine_id] if one.keys.user.name == message.user]
        if not named:
            return Verdict(result="unknown_user")
        for sender in named:  # one name may have other passphrases on another card
            if sender.keys.proves(message):
                return self._authentic(message, sender)
        return Verdict(result="not_authentic")

    def _authentic(self, message: UsmMessage, sender: _Sender) -> Verdict:
        ours = sender.ups is None
        if not (self._is_our_time(message) if ours else self._is_its_time(message, sender)):
            self._not_in_time += 1
            reports = ours and message.flags & codec.REPORTABLE
            told = self._report(codec.NOT_IN_TIME, self._not_in_time, message, sender) if reports else None
            return Verdict(result="out_of_time", answer=told)
        try:
            pdu = codec.parse_scoped(sender.keys.opened(message))
            notification = notification_of(pdu)
        except UndecipherableError:
            return Verdict(result="undecipherable")
        except NotATrapError:
            raise
        except MessageError:
            # Behind a good digest stand bytes of the card's own: it is the privacy passphrase that is wrong.
            if not message.flags & codec.PRIV:
                raise
            return Verdict(result="undecipherable")
        told = self._answer(message, sender, pdu) if notification.confirmed and ours else None
        return Verdict(result="hint", ups=sender.ups, notification=notification, answer=told)

    # --- Time (RFC 3414 3.2, 7) ---------------------------------------------------------------------------------

    def _is_our_time(self, message: UsmMessage) -> bool:
        return message.boots == self._boots and abs(message.time_s - self._time_s()) <= WINDOW_S

    def _is_its_time(self, message: UsmMessage, sender: _Sender) -> bool:
        return sender.clock.takes(message.boots, message.time_s, self._clock())

    def _time_s(self) -> int:
        return int(self._clock() - self._began_s)

    # --- Answers ------------------------------------------------------------------------------------------------

    def _report(self, counter: bytes, count: int, message: UsmMessage, sender: _Sender | None = None) -> bytes:
        scoped = codec.scoped(self._engine_id, _NOBODY, ber.REPORT, codec.report(counter, count))
        if sender is not None:
            return sender.keys.sealed(message.message_id, codec.AUTH, self._boots, self._time_s(), scoped)
        whole, _ = codec.seal(
            message_id=message.message_id,
            flags=0,
            engine=(self._engine_id, self._boots, self._time_s()),
            user=_NOBODY,
            salt=b"",
            digest_bytes=0,
            payload=scoped,
        )
        return whole

    def _answer(self, message: UsmMessage, sender: _Sender, pdu: ScopedPdu) -> bytes:
        scoped = codec.scoped(pdu.context_engine, pdu.context_name, ber.RESPONSE, pdu.content)
        return sender.keys.sealed(message.message_id, sender.keys.user.level, self._boots, self._time_s(), scoped)
