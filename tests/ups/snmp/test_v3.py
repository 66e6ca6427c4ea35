"""Version 3 against cards that lie, are replaced or forget the time, and against those who forge a card's answers."""

import asyncio
import contextlib
import copy
import hmac
import itertools
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyasn1.type import univ
from pysnmp.entity import config
from pysnmp.proto import rfc1905
from structlog.testing import capture_logs

from powerguard.options import Secret
from powerguard.sim import snmp_values as sim
from powerguard.ups.snmp.engine import Access, User
from powerguard.ups.snmp.port import SnmpError, Typed
from tests.peers.snmp_agent import Fault, OnSet, ReportError, Request, SimUser, SnmpAgent, _Pdu
from tests.ups.snmp.snmp_helpers import A, options, port_to, secret, table
from tests.wire import ber
from tests.wire import v3 as codec

pytestmark = pytest.mark.hurried

STATUS = f"{A}.4.1.1.0"
AUTH, PRIV = "authpass-of-the-tests", "privpass-of-the-tests"
OTHER = b"\x80\x00\x00\x00\x05another-card"
_AUTH, _PRIV = 1, 2


def user_of_card(**more: object) -> SimUser:
    return SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode(), **more)  # type: ignore[arg-type]


def credentials(folder: Path) -> dict[str, Any]:
    return {"version": 3, "user": "pg", "auth": secret(folder, "auth", AUTH), "priv": secret(folder, "priv", PRIV)}


Forge = Callable[["Card", Request, bytes], bytes]
"""Makes the message that comes before the card's own answer: out of the question, and of an answer that would lie."""


class Card(SnmpAgent):
    """A card, and somebody on the way to it who sees all that is sent and whose answers come first."""

    def __init__(self, user: SimUser, on_set: OnSet | None = None) -> None:
        self.values = table("apc")
        super().__init__(lambda: self.values, user=user, on_set=on_set)
        self.user = user
        self.asked: list[codec.UsmMessage] = []
        self.answers: list[bytes] = []
        self.forge: Forge | None = None

    def receive(self, message: bytes, sender: tuple[str, int]) -> None:
        self.asked.append(codec.parse(message))
        if self.forge is not None:
            with contextlib.suppress(ReportError):
                request = self.user.open(message)
                lie = _Pdu(
                    kind=rfc1905.ResponsePDU,
                    request_id=_Pdu.parse(request.pdu).request_id,
                    varbinds=((STATUS, sim.integer(3)),),
                )
                self._send(self.forge(self, request, lie.encode()), sender)
        super().receive(message, sender)

    def _send(self, answer: bytes, sender: tuple[str, int]) -> None:
        self.answers.append(answer)
        super()._send(answer, sender)

    def become(self, user: SimUser) -> None:
        """Be another card from now on."""
        self.user = self._user = user


class Unsigned(Card):
    """A card that sends a large number without the byte that makes it positive."""

    def _respond(self, pdu: _Pdu, *, v1: bool, may_write: bool) -> Any:  # noqa: ANN401
        answer = super()._respond(pdu, v1=v1, may_write=may_write)
        return None if answer is None else Shortened(answer)


@dataclass(frozen=True)
class Shortened:
    pdu: _Pdu

    def encode(self) -> bytes:
        return self.pdu.encode().replace(b"\x43\x04\x33", b"\x43\x04\xb3")


@pytest.mark.parametrize("priv", [True, False])
async def test_a_number_without_the_byte_that_makes_it_positive(tmp_path: Path, *, priv: bool) -> None:
    """One of them must not cost the whole answer, nor read as a wrong priv passphrase."""
    user = SimUser(name="pg", auth=AUTH.encode(), priv=PRIV.encode() if priv else None)
    given = {key: value for key, value in credentials(tmp_path).items() if priv or key != "priv"}
    up_time = "1.3.6.1.2.1.1.3.0"
    async with Unsigned(user) as agent, port_to(agent, **given) as port:
        agent.values[up_time] = sim.timeticks(0x339961ED)
        assert await port.get([up_time, STATUS]) == {up_time: 0xB39961ED, STATUS: 2}


def sealed(request: Request, pdu: bytes, *, by: SimUser, level: int = _AUTH | _PRIV, **changes: object) -> bytes:
    """Seal with the card's own keys, and whatever else is changed."""
    forger = copy.copy(by)
    for name, value in changes.items():
        setattr(forger, name, value)
    return forger._seal(request.message_id, level, request.context_name, pdu)


def shortened(card: Card, request: Request, pdu: bytes) -> bytes:
    """Return a message whose digest is the first byte of the right one: one of 256 guesses would do."""
    result = codec.parse(sealed(request, pdu, by=card.user))
    whole, at = codec.seal(
        message_id=result.message_id,
        flags=result.flags,
        engine=(result.engine_id, result.boots, result.time_s),
        user=result.user,
        salt=result.salt,
        digest_bytes=1,
        payload=ber.element(ber.OCTETS, result.payload),
    )
    return whole[:at] + hmac.digest(card.user._auth_key, whole, "sha1")[:1] + whole[at + 1 :]


def bad_digest(card: Card, request: Request, pdu: bytes) -> bytes:
    whole = sealed(request, pdu, by=card.user)
    return whole[:-1] + bytes((whole[-1] ^ 1,))


def report(counter: int, level: int = 0, **changes: object) -> Forge:
    def forge(card: Card, request: Request, _pdu: bytes) -> bytes:
        result = codec.report(codec.UNKNOWN_ENGINE[:-2] + bytes((counter, 0)), 1)
        return sealed(request, ber.element(ber.REPORT, result), by=card.user, level=level, **changes)

    return forge


FORGED: dict[str, Forge] = {
    "without a proof": lambda card, request, pdu: sealed(request, pdu, by=card.user, level=0),
    "proved, and not enciphered": lambda card, request, pdu: sealed(request, pdu, by=card.user, level=_AUTH),
    "with a wrong digest": bad_digest,
    "with the first byte of a digest": shortened,
    "with another passphrase": lambda card, request, pdu: sealed(
        request, pdu, by=SimUser(name="pg", auth=b"another passphrase", priv=PRIV.encode())
    ),
    "of another engine": lambda card, request, pdu: sealed(request, pdu, by=card.user, engine_id=OTHER),
    "of another user": lambda card, request, pdu: sealed(request, pdu, by=card.user, name="other"),
    "to another question": lambda card, request, pdu: sealed(request, pdu.replace(pdu[4:8], bytes(4), 1), by=card.user),
    "with another number": lambda card, request, pdu: card.user._seal(request.message_id ^ 1, 3, b"", pdu),
    "from another context": lambda card, request, pdu: card.user._seal(request.message_id, 3, b"other", pdu),
    "a trap": lambda card, request, pdu: sealed(request, b"\xa7" + pdu[1:], by=card.user),
    "our own question": lambda card, request, pdu: sealed(request, request.pdu, by=card.user),
    "an answer of before": lambda card, request, pdu: card.answers[-1],
    "a Report: wrong digest": report(5),
    "a Report: unknown user": report(3),
    "a Report: another level": report(1),
    "a Report: the time, without a proof": report(2),
    "a Report: another engine": report(4, engine_id=OTHER),
    "a Report: the same engine": report(4),
    "a Report: without a user": report(5, _AUTH, name="", _auth_key=bytes(20)),
    "a Report: nonsense": lambda card, request, pdu: sealed(
        request, ber.element(ber.REPORT, b""), by=card.user, level=0
    ),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
async def test_what_is_forged_is_no_answer_and_takes_none_away(forge: Forge, tmp_path: Path) -> None:
    """Whoever is on the way answers first: what he says is not believed, and the card's own answer still counts."""
    async with Card(user_of_card(boots=3)) as card, port_to(card, **credentials(tmp_path)) as port:
        card.user._began_s -= 1000
        assert await port.get([STATUS]) == {STATUS: 2}
        card.forge = forge
        for _ in range(3):
            assert await port.get([STATUS]) == {STATUS: 2}


async def test_what_is_believed_is_what_the_card_says(tmp_path: Path) -> None:
    """The forger of the test above, with the card's keys, time and numbers: else he might fail for another reason."""
    async with Card(user_of_card()) as card, port_to(card, **credentials(tmp_path)) as port:
        assert await port.get([STATUS]) == {STATUS: 2}
        card.forge = lambda card, request, pdu: sealed(request, pdu, by=card.user)
        assert await port.get([STATUS]) == {STATUS: 3}


async def test_nothing_is_sealed_for_a_time_that_nobody_proved(tmp_path: Path) -> None:
    """Who answers the first question may name a time to come, and then send the card what was sealed for it."""
    async with Card(user_of_card(boots=7)) as card, port_to(card, **credentials(tmp_path)) as port:
        card.user._began_s -= 5000
        assert await port.get([STATUS]) == {STATUS: 2}
        found = [(one.boots, one.time_s) for one in card.asked]
        assert found == [(0, 0), (0, 0), (7, card.user.engine_time_s)]
        assert [one.level for one in card.asked] == [0, 3, 3]
        assert len(card.asked) == 3, "and no more is asked than that"


async def test_no_salt_and_no_number_comes_twice(tmp_path: Path) -> None:
    """Of all sockets and questions, and of a question that is asked again; by the numbers nothing can be foreseen."""
    async with Card(user_of_card()) as card:
        for _ in range(3):
            async with port_to(card, retries=1, timeout_s=0.5, **credentials(tmp_path)) as port:
                for _ in range(20):
                    await port.get([STATUS])
                if card.user.boots == 2:
                    continue
                card.user.boots, card.fault = 2, Fault.DROP
                with pytest.raises(SnmpError):
                    await port.get([STATUS])
                card.fault = Fault.NONE
        salts = [one.salt for one in card.asked if one.salt]
        numbers = [one.message_id for one in card.asked]
    assert len(set(salts)) == len(salts) > 61
    assert len(set(numbers)) == len(numbers)
    steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
    assert len(steps) > len(numbers) - 3


async def test_another_card_in_its_place_is_reported_and_asked(tmp_path: Path) -> None:
    """With the same settings and another engine id: greeted anew when it does not answer, and told once."""
    async with Card(user_of_card()) as card, port_to(card, timeout_s=1.0, **credentials(tmp_path)) as port:
        card.user._began_s -= 5000
        assert await port.get([STATUS]) == {STATUS: 2}
        card.become(user_of_card(engine_id=OTHER))
        with capture_logs() as logs:
            assert await port.get([STATUS]) == {STATUS: 2}
            assert await port.get([STATUS]) == {STATUS: 2}
    (logged,) = logs
    assert (logged["event"], logged["now"]) == ("engine_changed", OTHER.hex())
    assert "traps.users" in logged["because"]


async def test_an_order_is_not_sent_again_for_a_report_that_proves_nothing(tmp_path: Path) -> None:
    """That the engine is another one may be forged, after the order was carried out: whoever ordered it must look."""
    done: list[str] = []

    def on_set(oid: str, _value: sim.SimValue) -> bool:
        done.append(oid)
        return True

    async with (
        Card(user_of_card(), on_set) as card,
        port_to(card, retries=1, timeout_s=0.5, **credentials(tmp_path)) as port,
    ):
        assert await port.get([STATUS]) == {STATUS: 2}
        for forge in (report(4, engine_id=OTHER), report(5)):
            done.clear()
            card.forge, card.fault = forge, Fault.SET_MUTE
            with pytest.raises(SnmpError, match=r"refuses \(v3\)") as caught:
                await port.set({STATUS: Typed("integer", 2)})
            assert caught.value.unanswered, "it was carried out, for all we know"
            assert done == [STATUS]
        card.forge, card.fault = None, Fault.NONE
        assert await port.get([STATUS]) == {STATUS: 2}
        card.user.reboot()
        await port.set({STATUS: Typed("integer", 2)})
        assert done == [STATUS, STATUS], "a refusal for the time is proved: that one was not carried out"
        card.become(user_of_card(engine_id=OTHER))
        with pytest.raises(SnmpError, match="engine id"):
            await port.set({STATUS: Typed("integer", 2)})
        assert done == [STATUS, STATUS]
        assert await port.get([STATUS]) == {STATUS: 2}


def raw(card: Card, request: Request, level: int, scoped: bytes) -> bytes:
    """Seal anything with the card's own keys, number and time."""
    user, salt = card.user, b""
    place = (user.boots, user.engine_time_s)
    if level & _PRIV:
        sealed_text, result = config.PRIV_SERVICES[config.USM_PRIV_CFB128_AES].encrypt_data(
            univ.OctetString(user._priv_key), (*place, None), scoped
        )
        scoped, salt = ber.element(ber.OCTETS, bytes(sealed_text)), bytes(result)
    whole, at = codec.seal(
        message_id=request.message_id,
        flags=level,
        engine=(user.engine_id, *place),
        user=b"pg",
        salt=salt,
        digest_bytes=12 if level else 0,
        payload=scoped,
    )
    return whole[:at] + hmac.digest(user._auth_key, whole, "sha1")[:12] + whole[at + 12 :] if level else whole


async def test_whatever_a_card_seals(tmp_path: Path) -> None:
    """With the right keys, number and time stands anything: it is no answer, no error, and takes none away."""
    dice = random.Random(4711)
    heads = (b"", b"\x30\x0e\x04\x00\x04\x00\xa2\x08", b"\x30\x2b\x04\x00\x04\x00\xa8\x25\x02\x01\x00")
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with Card(user_of_card()) as card, port_to(card, **credentials(tmp_path)) as port:
        assert await port.get([STATUS]) == {STATUS: 2}
        card.forge = lambda card, request, pdu: raw(
            card, request, dice.choice((0, 1, 3)), dice.choice(heads) + dice.randbytes(dice.randrange(60))
        )
        for _ in range(200):
            assert await port.get([STATUS]) == {STATUS: 2}
    assert raised == []


@pytest.mark.parametrize("counts", [True, False])
async def test_a_card_that_starts_again(counts: bool, tmp_path: Path) -> None:
    """Within the one question: also one that does not count its starts, which else were deaf to us until ours."""
    user = user_of_card(boots=3)
    async with Card(user) as card, port_to(card, **credentials(tmp_path)) as port:
        user._began_s -= 5000
        assert await port.get([STATUS]) == {STATUS: 2}
        before = len(card.asked)
        user.reboot()
        user.boots = 4 if counts else 3
        assert await port.get([STATUS]) == {STATUS: 2}
        assert len(card.asked) == before + 2
        report_of_before = card.answers[1]
        card.forge = lambda card, request, pdu: report_of_before
        assert await port.get([STATUS]) == {STATUS: 2}


async def test_who_answers_first_does_not_become_the_card(tmp_path: Path) -> None:
    """After silence the engine is looked for anew, and that answer proves nothing: the card that is known stays so."""
    async with Card(user_of_card()) as card, port_to(card, timeout_s=0.5, **credentials(tmp_path)) as port:
        assert await port.get([STATUS]) == {STATUS: 2}
        known = card.user
        card.become(SimUser(name="pg", auth=b"another passphrase", priv=PRIV.encode(), engine_id=OTHER))
        with capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(SnmpError, match="auth passphrase"):
                    await port.get([STATUS])
            card.become(known)
            assert await port.get([STATUS]) == {STATUS: 2}
        assert logs == []


async def test_a_card_that_cannot_start_any_more(tmp_path: Path) -> None:
    """RFC 3414 2.2.2: once its count of starts is at its end it is in nobody's window, and has to be set up anew."""
    async with (
        Card(user_of_card(boots=2**31 - 1)) as card,
        port_to(card, timeout_s=1.0, **credentials(tmp_path)) as port,
    ):
        with pytest.raises(SnmpError, match="the card's SNMPv3 clock jumps"):
            await port.get([STATUS])


async def test_a_card_that_never_agrees_on_the_time(tmp_path: Path) -> None:
    """Its clock jumps by more than the window with each question: that ends, and is told."""
    user = user_of_card()
    async with Card(user) as card, port_to(card, **credentials(tmp_path)) as port:
        assert await port.get([STATUS]) == {STATUS: 2}
        before = len(card.asked)

        user.clock = lambda: user._began_s + 1000.0 * len(card.asked)
        with pytest.raises(SnmpError, match="the card's SNMPv3 clock jumps"):
            await port.get([STATUS])
        assert len(card.asked) - before <= 5


@pytest.mark.parametrize("fault", [Fault.GARBAGE, Fault.TRUNCATED, Fault.WRONG_ID, Fault.LATE])
async def test_no_answer_of_ours_is_no_answer(fault: Fault, tmp_path: Path) -> None:
    """As with versions 1 and 2c; and what comes late is not taken for what was asked next."""
    async with Card(user_of_card()) as card, port_to(card, timeout_s=0.5, **credentials(tmp_path)) as port:
        assert await port.get([STATUS]) == {STATUS: 2}
        card.fault, card.late_s = fault, 0.7
        with pytest.raises(SnmpError) as caught:
            await port.get([STATUS])
        assert caught.value.unanswered
        assert str(caught.value) == (
            f"no answer from 127.0.0.1:{card.port} in 0.5 s (v3): check address, user, priv passphrase, ACL of the card"
        )
        card.fault = Fault.NONE
        card.values[STATUS] = sim.integer(3)
        assert await port.get([STATUS]) == {STATUS: 3}


@pytest.mark.parametrize("fault", [Fault.FEWER, Fault.SWAPPED, Fault.TWICE, Fault.GEN_ERR, Fault.TOO_BIG])
async def test_a_card_that_answers_badly(fault: Fault, tmp_path: Path) -> None:
    """Order, gaps, repetitions and error status are the port's own affair, in every version."""
    asked = [oid for oid in table("apc") if oid.startswith(A)]
    async with Card(user_of_card()) as card, port_to(card, **credentials(tmp_path)) as port:
        good = await port.get(asked)
        card.fault = fault
        if fault is Fault.GEN_ERR:
            with pytest.raises(SnmpError, match="genErr"):
                await port.get(asked)
            return
        result = await port.get(asked)
    assert sum(result[oid] == good[oid] for oid in asked) >= len(asked) - (4 if fault is Fault.FEWER else 0)


async def test_two_questions_at_once(tmp_path: Path) -> None:
    """A poll and a doctor's probe through one port, before the card is known: each has its own answer."""
    async with Card(user_of_card()) as card, port_to(card, **credentials(tmp_path)) as port:
        oids = [oid for oid in table("apc") if oid.startswith(A)][:6]
        result = await asyncio.gather(*(port.get([oid]) for oid in oids))
        assert [next(iter(one)) for one in result] == oids
        assert len(card.asked) == 2 + len(oids)


def test_no_repr_and_no_traceback_shows_a_key(tmp_path: Path) -> None:
    settings = options(161, **credentials(tmp_path))
    user = User.read("pg", settings)
    shown = repr((user, Access("here", 3, user=user), Access("here", "2c", community=b"of-the-tests"), settings))
    try:
        user.add_to(None)
    except AttributeError as error:
        shown += "".join(traceback.format_exception(error))
    assert "AttributeError" in shown
    for hidden in (bytes(user._auth), bytes(user._priv), AUTH.encode(), PRIV.encode(), b"of-the-tests"):
        assert repr(hidden)[2:-1] not in shown
        assert hidden.hex() not in shown


async def test_a_user_without_a_passphrase_proves_nothing_and_asks_all_the_same(tmp_path: Path) -> None:
    """noAuthNoPriv against a card that wants more: told as another security level."""
    async with Card(user_of_card()) as card, port_to(card, version=3, user="pg", timeout_s=1.0) as port:
        with pytest.raises(SnmpError, match="another security level on the card"):
            await port.get([STATUS])
        assert [one.level for one in card.asked] == [0, 0]
    async with Card(user_of_card()) as card:
        async with port_to(card, version=3, user="pg", auth=Secret(file=str(tmp_path / "none"))) as port:
            with pytest.raises(SnmpError, match="No such file"):
                await port.get([STATUS])
        assert card.asked == []
