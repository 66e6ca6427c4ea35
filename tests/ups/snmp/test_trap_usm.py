"""The receiver's side of RFC 3414 with messages made by hand: what no tool of net-snmp sends, and attackers do."""

import hmac
from pathlib import Path

import pytest

from powerguard.ups.snmp.engine import MessageError
from powerguard.ups.snmp.notification import NotATrapError, TrapReceiver, TrapResult
from powerguard.ups.snmp.options import TrapUser
from tests.peers.snmp_agent import localized_key
from tests.ups.snmp.trap_helpers import AUTH, ENGINE, secret_file, users
from tests.wire import ber
from tests.wire import v3 as codec
from tests.wire.v3 import UsmMessage

OURS, CARD = b"\x80\x00\x00\x00\x05ours", bytes.fromhex(ENGINE)
BOOTS = 1_795_000_000
PDU = ber.integer(7) + ber.integer(0) * 2 + ber.element(ber.SEQUENCE, b"")
NOW = [500.0]


@pytest.fixture
def usm(tmp_path: Path) -> TrapReceiver:
    """One user without privacy; we have been up for 500 s."""
    NOW[0] = 0.0
    made = TrapReceiver(engine_id=OURS, boots=BOOTS, clock=lambda: NOW[0])
    NOW[0] = 500.0
    assert made.add([TrapUser.model_validate({**users(tmp_path)[0], "priv": None})]) == []
    return made


def sealed(
    *,
    engine: bytes = OURS,
    boots: int = BOOTS,
    time_s: int = 500,
    flags: int = codec.AUTH | codec.REPORTABLE,
    tag: int = ber.INFORM,
    secret: str = AUTH,
    payload: bytes | None = None,
) -> bytes:
    whole, at = codec.seal(
        message_id=99,
        flags=flags,
        engine=(engine, boots, time_s),
        user=b"pgtrap",
        salt=b"",
        digest_bytes=12,
        payload=codec.scoped(engine, b"", tag, PDU) if payload is None else payload,
    )
    digest = hmac.digest(localized_key(secret.encode(), engine), whole, "sha1")[:12]
    return whole[:at] + digest + whole[at + 12 :]


def judged(usm: TrapReceiver, data: bytes) -> TrapResult:
    return usm.receive(data)


def proved(answer: bytes | None) -> UsmMessage:
    """Read an answer as the card would: its digest must be right."""
    assert answer is not None
    message = codec.parse(answer)
    blank = answer[: message.digest_at] + bytes(12) + answer[message.digest_at + 12 :]
    assert hmac.digest(localized_key(AUTH.encode(), OURS), blank, "sha1")[:12] == message.digest
    return message


def test_an_inform_is_answered_with_a_proof(usm: TrapReceiver) -> None:
    verdict = judged(usm, sealed())
    assert (verdict.result, verdict.ups) == ("hint", None)
    outcome = proved(verdict.answer)
    assert (outcome.message_id, outcome.boots, outcome.time_s, outcome.user) == (99, BOOTS, 500, b"pgtrap")
    assert codec.parse_scoped(outcome.payload).tag == ber.RESPONSE


@pytest.mark.parametrize(("boots", "time_s"), [(BOOTS - 1, 500), (BOOTS, 349), (BOOTS, 651), (BOOTS + 1, 500)])
def test_a_recorded_inform_is_answered_with_our_time_and_nothing_else(
    usm: TrapReceiver, boots: int, time_s: int
) -> None:
    """RFC 3414 3.2.7a: the Report is authenticated, so that a card whose clock has drifted may believe it."""
    verdict = judged(usm, sealed(boots=boots, time_s=time_s))
    assert verdict.result == "out_of_time"
    assert (proved(verdict.answer).boots, proved(verdict.answer).time_s) == (BOOTS, 500)
    assert judged(usm, sealed(boots=boots, time_s=time_s, flags=codec.AUTH)).answer is None, "not asked for"


def test_a_clock_that_has_reached_its_end(usm: TrapReceiver) -> None:
    """RFC 3414 2.3: an engine whose boots stand at the highest is believed no more; what is beyond it is no message."""
    data = sealed(engine=CARD, boots=codec.LAST, time_s=5, flags=codec.AUTH, tag=ber.TRAP_V2)
    assert judged(usm, data) == TrapResult(result="out_of_time")


def test_what_is_authentic_and_no_trap(usm: TrapReceiver) -> None:
    with pytest.raises(NotATrapError):
        judged(usm, sealed(tag=ber.GET))
    with pytest.raises(MessageError):
        judged(usm, sealed(payload=ber.element(ber.SEQUENCE, b"\x04\x00")))


def test_without_a_digest_nothing_is_taken(usm: TrapReceiver) -> None:
    """pysnmp's own receiver hands such a trap on."""
    for flags in (0, codec.REPORTABLE, codec.AUTH | codec.PRIV):
        payload = ber.element(ber.OCTETS, bytes(16)) if flags & codec.PRIV else None
        assert judged(usm, sealed(flags=flags, payload=payload)).result == "not_authentic"
    assert judged(usm, sealed(secret="another passphrase")).result == "not_authentic"


def test_the_question_for_our_engine_id(usm: TrapReceiver) -> None:
    """Answered without a proof, for nobody has proved anything yet; only if it asks for an answer."""
    whole, _ = codec.seal(
        message_id=5,
        flags=codec.REPORTABLE,
        engine=(b"", 0, 0),
        user=b"",
        salt=b"",
        digest_bytes=0,
        payload=codec.scoped(b"", b"", ber.GET, PDU),
    )
    verdict = judged(usm, whole)
    assert verdict.result == "discovery"
    assert verdict.answer is not None
    outcome = codec.parse(verdict.answer)
    assert (outcome.engine_id, outcome.boots, outcome.time_s, outcome.flags, outcome.message_id) == (
        OURS,
        BOOTS,
        500,
        0,
        5,
    )
    assert judged(usm, sealed(engine=b"\x80another", flags=codec.AUTH)) == TrapResult(
        result="unknown_engine", engine_id=b"\x80another"
    )


def test_one_name_may_have_another_passphrase_on_each_card(tmp_path: Path) -> None:
    other = b"\x80\x00\x00\x00\x05other"
    usm = TrapReceiver(engine_id=OURS, boots=BOOTS, clock=lambda: 0.0)
    second = {"auth": secret_file(tmp_path, "second", "second-passphrase"), "engines": {"rack-b": other.hex()}}
    first = {**users(tmp_path)[0], "priv": None}
    problems = usm.add(TrapUser.model_validate({**first, **more}) for more in ({}, second))
    assert problems == []
    for engine, secret, ups in ((CARD, AUTH, "rack-a"), (other, "second-passphrase", "rack-b")):
        data = sealed(engine=engine, boots=1, time_s=1, flags=codec.AUTH, tag=ber.TRAP_V2, secret=secret)
        assert judged(usm, data).ups == ups
        assert judged(usm, sealed(time_s=0, secret=secret)).result == "hint", "both may send informs"
    assert judged(usm, sealed(engine=other, flags=codec.AUTH, secret=AUTH)).result == "not_authentic"


def test_authentic_and_deciphered_into_nothing(tmp_path: Path) -> None:
    """A card with another privacy passphrase; and a salt and a ciphertext that no cipher has made."""
    for protocol in ("AES", "DES"):
        usm = TrapReceiver(engine_id=OURS, boots=BOOTS, clock=lambda: 0.0)
        assert usm.add([TrapUser.model_validate({**users(tmp_path)[0], "priv_protocol": protocol})]) == []
        for content in (b"", bytes(7), bytes(64)):
            payload = ber.element(ber.OCTETS, content)
            data = sealed(engine=CARD, boots=1, time_s=1, flags=codec.AUTH | codec.PRIV, payload=payload)
            assert judged(usm, data).result == "undecipherable"
        (tmp_path / "trap-auth").unlink()
        (tmp_path / "trap-priv").unlink()
