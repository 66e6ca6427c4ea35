"""A million inputs for what reads the texts of upsd and apcupsd, and the kernel's rtnetlink; a slice in every run."""

import random
import time

import pytest

from powerguard.core.model.events import OutputSource
from powerguard.ups.apcupsd.protocol import NisError, parse_status
from powerguard.ups.apcupsd.source import draft_of
from powerguard.ups.network import parse
from powerguard.ups.nut.variables import STATUS, WANTED, interpret
from powerguard.ups.profiles.vocabulary import NUMBERS

TOKENS = (
    "OL",
    "OB",
    "LB",
    "FSD",
    "CAL",
    "BYPASS",
    "OFF",
    "TEST",
    "ALARM",
    "WAIT",
    "TRIM",
    "",
    "ol",
    "X" * 40,
    "\0",
    "٣",
)
VALUES = (
    "0",
    "-1",
    "230",
    "1e5",
    "9" * 18,
    "inf",
    "nan",
    "65535",
    "4294967295",
    " 12 ",
    "1,5",
    "0x10",
    "",
    "99.9",
    "\x1b",
)
A_MILLION = 1_000_000
PARTS = 4
EVERY_RUN = 3_000


def texts_of_upsd(dice: random.Random) -> None:
    names = dice.choices(WANTED, k=dice.randrange(8))
    variables = {name: dice.choice(VALUES) for name in names}
    variables[STATUS] = " ".join(dice.choices(TOKENS, k=dice.randrange(5)))
    reading = interpret(variables).reading(at_s=1.0, ups="a", source="s", authenticated=False)
    for name, window in NUMBERS.items():
        value = getattr(reading, name, None)
        assert value is None or window.lowest <= value <= window.highest, (name, variables)
    if "OL" not in variables[STATUS].split():
        assert reading.output_source is not OutputSource.UTILITY, variables


KEYS = ("BCHARGE", "TIMELEFT", "LOADPCT", "LINEV", "ITEMP", "LASTXFER", "SELFTEST", "DATE", "STATUS", "NOMPOWER")
FLAGS = ("0x05000008", "0x05060010", "0x0", "0x05000000", "0xFFFFFFFF", "0x05060250", "0x", "ONLINE")
RECORDS = (
    "100.0 Percent",
    "N/A",
    "12.0 Minutes",
    "-5 C",
    "230.0 Volts",
    "2026-11-21 04:20:57 +0000",
    "In progress",
    ":",
)


def records_of_apcupsd(dice: random.Random) -> None:
    lines = [f"{key:<9}: {dice.choice(RECORDS + VALUES)}\n" for key in dice.sample(KEYS, k=dice.randrange(9))]
    lines += [f"STATFLAG : {dice.choice(FLAGS)}\n", f"END APC  : {dice.choice(RECORDS)}\n"]
    frames = [line.encode("utf-8", "replace") for line in lines]
    size = sum(map(len, frames)) + (dice.random() < 0.1)
    frames.insert(0, f"APC      : 001,{len(frames):03},{size:04}\n".encode())
    try:
        status = parse_status(frames)
    except NisError:
        return
    draft = draft_of(status)
    for name, value in draft.numbers.items():
        assert NUMBERS[name].lowest <= value <= NUMBERS[name].highest, (name, lines)
    if not status.flags & 0x8:
        assert draft.output_source in (OutputSource.BATTERY, OutputSource.UNKNOWN), lines
    read.append(len(draft.numbers))
    del read[1:]


read: list[int] = []


def words_of_the_kernel(dice: random.Random) -> None:
    raw = bytearray(dice.randbytes(dice.randrange(120)))
    if len(raw) >= 16 and dice.random() < 0.8:
        length = dice.choice((len(raw), 16, 32, 40, dice.randrange(300)))
        raw[:16] = length.to_bytes(4, "little") + dice.choice((2, 16, 17, 24, 25, 28)).to_bytes(2, "little") + bytes(10)
    assert len(list(parse(bytes(raw)))) <= max(1, len(raw) // 16)


READERS = {"upsd": texts_of_upsd, "apcupsd": records_of_apcupsd, "rtnetlink": words_of_the_kernel}


@pytest.mark.parametrize("of", READERS)
def test_a_slice_of_them(of: str) -> None:
    dice = random.Random(f"{of} slice")
    for _ in range(EVERY_RUN):
        READERS[of](dice)
    assert of != "apcupsd" or read, "some of them are whole"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("of", READERS)
def test_a_million_of_them(of: str, part: int) -> None:
    """No exception but the codec's own, nothing outside of what is believable, and none that takes long."""
    dice = random.Random(f"{of} {part}")
    slowest_s = 0.0
    for _ in range(A_MILLION // PARTS):
        began_s = time.thread_time()
        READERS[of](dice)
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    assert slowest_s < 5.0
