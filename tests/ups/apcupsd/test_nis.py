"""apcupsd's NIS: exact bytes both ways, and any bytes at all, which may raise nothing but NisError."""

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.ups.apcupsd.protocol import Flag, NisError, Reply, Status, parse_status, request, stamp_s

RECORDS = (
    "DATE     : 2026-11-21 04:20:12 +0000  ",
    "HOSTNAME : power",
    "UPSNAME  : rack a",
    "STATUS   : ONBATT ",
    "LINEV    : 000.0 Volts",
    "LOADPCT  :  40.0 Percent",
    "BCHARGE  : 098.0 Percent",
    "TIMELEFT :  27.5 Minutes",
    "TONBATT  : 12 Seconds",
    "XOFFBATT : N/A",
    "STATFLAG : 0x05060010",
    "END APC  : 2026-11-21 04:20:57 +0000  ",
)


def frames(*records: str) -> list[bytes]:
    """Frame records as apcupsd counts them, header first."""
    lines = [f"{record}\n".encode() for record in records]
    return [f"APC      : 001,{len(lines):03d},{sum(map(len, lines)):04d}\n".encode(), *lines]


def on_the_wire(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(2, "big") + part for part in parts) + b"\0\0"


def status(*records: str) -> Status:
    return parse_status(frames(*records))


WHOLE = on_the_wire(frames(*RECORDS))


def changed(**replaced: str) -> list[str]:
    """The records with some of them replaced, by key; one of "" left out."""
    keyed = {record.partition(":")[0].strip(): record for record in RECORDS}
    keyed |= {key.replace("_", " "): f"{key.replace('_', ' '):9}: {text}" for key, text in replaced.items() if text}
    return [record for key, record in keyed.items() if replaced.get(key.replace(" ", "_")) != ""]


def test_a_request() -> None:
    assert request("status") == b"\x00\x06status"
    assert request("events") == b"\x00\x06events"
    for wrong in ("", "x" * 2000):
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            request(wrong)


def test_a_status() -> None:
    shown = status(*RECORDS)
    assert shown.flags == 0x05060010
    assert shown.flags & Flag.ONBATT
    assert not shown.flags & Flag.COMMLOST
    assert (shown.date, shown.age_s) == ("2026-11-21 04:20:12 +0000", 45.0)
    assert shown.values["UPSNAME"] == "rack a"
    assert [shown.number(key) for key in ("LINEV", "TIMELEFT", "TONBATT")] == [0.0, 27.5, 12.0]
    assert [shown.number(key) for key in ("XOFFBATT", "STATUS", "ITEMP")] == [None, None, None]


def test_a_status_of_an_older_apcupsd() -> None:
    """3.14 before 2009: dates with the name of a zone, and words behind numbers and flags."""
    shown = status(
        *changed(
            DATE="Sat Nov 21 04:20:12 CET 2026",
            END_APC="Sat Nov 21 04:20:14 CET 2026",
            STATFLAG="0x07000008 Status Flag",
            LOADPCT=" 16.2 Percent Load Capacity",
        )
    )
    assert (shown.flags, shown.age_s, shown.number("LOADPCT")) == (0x07000008, 2.0, 16.2)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100, 10_000])
def test_a_reply_comes_in_any_pieces(piece: int) -> None:
    reply = Reply()
    assert not reply.began
    answers = [reply.feed(WHOLE[at : at + piece]) for at in range(0, len(WHOLE), piece)]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert reply.began
    last = answers[-1]
    assert last is not None
    assert parse_status(last) == status(*RECORDS)


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (WHOLE + b"\0", "says more than it was asked for"),
        (WHOLE + WHOLE, "says more than it was asked for"),
        (b"HTTP/1.1 400 Bad Request\r\n", "is that the port of its NIS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is that the port of its NIS"),
        (b"\0\1x" * 600, "is that the port of its NIS"),
        ((b"\4\0" + b"x" * 1024) * 40, "more than 32768 bytes"),
    ],
)
def test_a_reply_that_is_none(wire: bytes, what: str) -> None:
    with pytest.raises(NisError, match=what):
        Reply().feed(wire)


def test_a_reply_that_goes_on_after_its_end() -> None:
    reply = Reply()
    assert reply.feed(WHOLE) is not None
    with pytest.raises(NisError, match="more than it was asked for"):
        reply.feed(b"\0")


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([], "sends an empty answer to `status`"),
        ([b"Invalid command\n\0"], "answers `Invalid command` to `status`"),
        ([b"Not available\n\0"], "answers `Not available` to `status`"),
        ([b"Apcupsd not running\n\0"], "answers `Apcupsd not running` to `status`"),
        ([b"\x1b[2Jx: y\n"], r"answers `\?\[2Jx: y` to `status`"),
        (frames(*RECORDS)[1:], "something else than an APC record"),
        (frames(*RECORDS)[:1], "breaks its status off: 0 bytes"),
        (frames(*RECORDS)[:-1], "breaks its status off"),
        ([*frames(*RECORDS)[:5], *frames(*RECORDS)[6:]], "breaks its status off"),
        (frames(*RECORDS[:-1]), "breaks its status off"),
        (frames(*RECORDS[::-1]), "breaks its status off"),
        (frames(*changed(STATFLAG="")), "has no STATFLAG"),
        (frames(*changed(STATFLAG="5060010")), "has no STATFLAG"),
        (frames(*changed(STATFLAG="0x123456789")), "has no STATFLAG"),
    ],
)
def test_a_status_that_is_none(parts: list[bytes], what: str) -> None:
    with pytest.raises(NisError, match=what):
        parse_status(parts)


def test_a_ups_cannot_name_itself_on_utility() -> None:
    """apcupsd cuts its records at newlines, also at those that a UPS has in its name or serial number."""
    with pytest.raises(NisError, match="has STATFLAG twice, with different values"):
        status("UPSNAME  : x", "STATFLAG : 0x05000008", *changed(UPSNAME=""))
    with pytest.raises(NisError, match="has STATFLAG twice, with different values"):
        status(*RECORDS[:-1], "SERIALNO : x", "STATFLAG : 0x05000008", RECORDS[-1])
    assert status("STATFLAG : 0x05060010", *RECORDS).flags == 0x05060010  # some models have it twice by nature


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01 00:00:10 +0000", 10.0),
        ("1970-01-01 01:00:10 +0100  ", 10.0),
        ("1969-12-31 18:30:10 -0530", 10.0),
        ("1970-01-01 00:00:10", 10.0),
        ("Thu Jan  1 00:00:10 UTC 1970", 10.0),
        ("Thu Jan 01 00:00:60 UTC 1970", 59.0),
        ("0000-00-00 00:00:00 +0000", None),
        ("2026-02-30 00:00:00 +0000", None),
        ("Xxx Xxx 01 00:00:00 UTC 1970", None),
        ("N/A", None),
        ("", None),
    ],
)
def test_dates(text: str, seconds: float | None) -> None:
    assert stamp_s(text) == seconds


def test_an_age_needs_both_dates() -> None:
    assert status(*changed(DATE="N/A")).age_s is None
    assert status(*changed(END_APC="soon")).age_s is None
    assert status(*changed(END_APC="2026-11-21 04:20:02 +0000")).age_s == -10.0


# --- Any bytes -------------------------------------------------------------------------------------------------------


def swallow(data: bytes) -> None:
    assert why_not(data).isprintable()


def why_not(data: bytes) -> str:
    """Read bytes as a source does, in two pieces: what is wrong with them. Only NisError is known."""
    reply = Reply()
    cut = len(data) // 3
    try:
        result = reply.feed(data[:cut]) or reply.feed(data[cut:])
        if result is not None:
            parsed = parse_status(result)
            assert 0 <= parsed.flags < 2**32
            assert parsed.age_s is None or abs(parsed.age_s) < 1e12
            for key in parsed.values:
                parsed.number(key)
    except NisError as error:
        return str(error)
    return ""


lines = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([record.encode() + b"\n" for record in RECORDS]),
        st.builds(
            lambda key, text: f"{key:9}: {text}\n".encode("utf-8", "surrogatepass"),
            st.sampled_from(["STATFLAG", "DATE", "END APC", "TIMELEFT", "LINEV", "APC", "UPSNAME"]),
            st.one_of(
                st.text(max_size=40),
                st.from_regex(r"0x[0-9A-F]{0,12}", fullmatch=True),
                st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} [+-][0-9]{4}", fullmatch=True),
                st.from_regex(r"-?[0-9]{1,12}\.?[0-9]{0,9} ?[A-Z]?", fullmatch=True),
            ),
        ),
    ),
    max_size=20,
)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    swallow(data)


@given(lines, st.booleans())
def test_any_records(parts: list[bytes], honest: bool) -> None:
    header = [f"APC      : 001,{len(parts):03d},{sum(map(len, parts)):04d}\n".encode()] if honest else []
    swallow(on_the_wire([*header, *parts]))


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_a_million_inputs_would_be_bounded_by_the_same_code(seed: int) -> None:
    """What the long run below does, in small."""
    mutants(seed, 20)


def mutants(seed: int, runs: int) -> None:
    """Break a good reply in ways that networks and bad programs do: flipped, cut, repeated, swapped, filled."""
    dice = random.Random(seed)
    for _ in range(runs):
        data = bytearray(WHOLE)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(data) + 1)
            match dice.randrange(6):
                case 0 if at < len(data):
                    data[at] = dice.randrange(256)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = data[at : at + dice.randrange(200)]
                case 3:
                    del data[at : at + dice.randrange(20)]
                case 4:
                    data[at:at] = dice.randbytes(dice.randrange(8))
                case _:
                    data += dice.randbytes(dice.randrange(40))
        swallow(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_million_inputs(part: int) -> None:
    """No exception but NisError, and no input that takes long: the whole of them does not either."""
    for seed in range(100):
        mutants(100 * part + seed, 1000)


@pytest.mark.slow
def test_broken_inputs_leave_no_memory_behind() -> None:
    mutants(1, 1000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    mutants(2, 50_000)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000, after - before
    assert peak - before < 2_000_000, peak - before
