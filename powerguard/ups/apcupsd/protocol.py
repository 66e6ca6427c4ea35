r"""apcupsd's network information server (NIS, TCP 3551): requests, replies, records, dates. Bytes in, values out.

A request is a 16-bit length, the high byte first, and a word; the reply is one such frame for each line, and an empty
frame. A status line is `KEY      : value\n`; the first is `APC      : revision,records,bytes`, the last `END APC  :
now`. Measured with apcupsd 3.14.14; the older 3.14s write their dates and flags in another style, which is read too.

The protocol has no authentication: a program that answers on that port can report anything.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final

PORT: Final = 3551
MAX_FRAME_BYTES: Final = 1024
"""apcupsd makes no line longer than 256 bytes."""
MAX_FRAMES: Final = 512
MAX_REPLY_BYTES: Final = 32 * 1024
"""apcupsd keeps a status in 4 KiB."""

_KEY: Final = re.compile(r"[A-Z0-9][A-Z0-9 ]{0,15}")
_NUMBER: Final = re.compile(r"(-?[0-9]{1,9}(?:\.[0-9]{1,6})?)(?: |$)")
_FLAGS: Final = re.compile(r"0x([0-9A-Fa-f]{1,8})(?: |$)")
_HEADER: Final = re.compile(r"[0-9]{1,6},[0-9]{1,6},([0-9]{1,6})")
_DATE: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})(?: ([+-])([0-9]{2})([0-9]{2}))?"
)
_OLD_DATE: Final = re.compile(
    r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) +([0-9]{1,2}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) [^ ]{1,8} ([0-9]{4})"
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UNASKED: Final = "says more than it was asked for"


class NisError(Exception):
    """The answer is not a status of apcupsd: the reason, for the operator."""


class Flag(IntEnum):
    """Bits of STATFLAG that mean something outside of apcupsd (its include/defines.h).

    No IntFlag: that remembers every combination that it ever sees, and a hostile peer has four thousand million.
    """

    CALIBRATION = 0x1
    TRIM = 0x2
    BOOST = 0x4
    ONLINE = 0x8
    ONBATT = 0x10
    OVERLOAD = 0x20
    BATTLOW = 0x40
    REPLACEBATT = 0x80
    COMMLOST = 0x100
    """apcupsd has lost its UPS; everything else is as it was then."""
    SHUTDOWN = 0x200
    """apcupsd has ordered its host's shutdown. Set until apcupsd is restarted, even if power returns."""
    SLAVE = 0x400
    FASTPOLL = 0x40000
    """apcupsd reads its UPS every second, not every POLLTIME."""
    BATTPRESENT = 0x4000000


def request(command: str) -> bytes:
    """Return a request: "status" or "events". Raises ValueError where it does not fit into a frame."""
    data = command.encode("ascii")
    if not 0 < len(data) <= MAX_FRAME_BYTES:
        msg = f"a command has 1 to {MAX_FRAME_BYTES} bytes"
        raise ValueError(msg)
    return len(data).to_bytes(2, "big") + data


class Reply:
    """Gathers the frames of one reply, in whatever pieces they come. For one reply only."""

    def __init__(self) -> None:
        """Wait for the first byte."""
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._size = 0
        self._ended = False

    @property
    def began(self) -> bool:
        """Whether anything was answered at all."""
        return self._size > 0

    def feed(self, data: bytes) -> tuple[bytes, ...] | None:
        """Take what was received; return the frames when the reply is whole, None before.

        Raises NisError when it is longer than any that apcupsd makes, or goes on after its end.
        """
        self._size += len(data)
        if self._size > MAX_REPLY_BYTES:
            msg = f"answers more than {MAX_REPLY_BYTES} bytes: is that apcupsd?"
            raise NisError(msg)
        if self._ended and data:
            raise NisError(_UNASKED)
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 2:
            length = int.from_bytes(self._buffer[at : at + 2], "big")
            if length > MAX_FRAME_BYTES or len(self._frames) > MAX_FRAMES:
                msg = "answers, but not as apcupsd does: is that the port of its NIS?"
                raise NisError(msg)
            if length == 0:
                if len(self._buffer) - at > 2:
                    raise NisError(_UNASKED)
                self._ended = True
                self._buffer.clear()
                return tuple(self._frames)
            if len(self._buffer) - at - 2 < length:
                break
            self._frames.append(bytes(self._buffer[at + 2 : at + 2 + length]))
            at += 2 + length
        del self._buffer[:at]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One status of apcupsd.

    flags: STATFLAG. date: when apcupsd last read its UPS, as it wrote it; a new text is a new observation.
    date_s, now_s: DATE and END APC in seconds of that host's wall clock, of which only the difference means anything;
        None when not reported.
    values: every other record; values that the UPS does not report are missing.
    """

    flags: int
    date: str
    date_s: float | None
    now_s: float | None
    values: Mapping[str, str]

    @property
    def age_s(self) -> float | None:
        """Whole seconds since apcupsd last read its UPS, less than 1 s off; below 0 when its clock was set back."""
        return None if self.now_s is None or self.date_s is None else self.now_s - self.date_s

    @property
    def back_for_s(self) -> float:
        """Seconds since utility came back, by that host's clock; 0 where it does not say."""
        back_s = stamp_s(self.values.get("XOFFBATT", ""))
        return 0.0 if self.now_s is None or back_s is None else max(0.0, self.now_s - back_s)

    def number(self, key: str) -> float | None:
        """Return the number that a record begins with, such as `30.0 Minutes`; None where there is none."""
        found = _NUMBER.match(self.values.get(key, ""))
        return None if found is None else float(found[1])


def parse_status(frames: Sequence[bytes]) -> Status:
    """Read the frames of a reply to `status`. Raises NisError only, on any bytes."""
    if not frames:
        msg = "sends an empty answer to `status`"
        raise NisError(msg)
    values: dict[str, str] = {}
    for frame in frames:
        text = frame.decode("utf-8", "replace")
        name, colon, rest = text.partition(":")
        key = name.strip()
        if not colon or not _KEY.fullmatch(key):
            msg = f"answers {_short(text)} to `status`"
            raise NisError(msg)
        if values.setdefault(key, rest.strip()) != rest.strip():
            # A UPS may name itself "x\nSTATFLAG : 0x08": apcupsd cuts its records at newlines, also within a name.
            msg = f"the reply has {key} twice, with different values"
            raise NisError(msg)
    _check_whole(frames, values)
    flags = _FLAGS.match(values.get("STATFLAG", ""))
    if flags is None:
        msg = f"the reply has no STATFLAG ({_short(values.get('STATUS', ''))})"
        raise NisError(msg)
    date = values.pop("DATE", "")
    return Status(
        flags=int(flags[1], 16),
        date=date,
        date_s=stamp_s(date),
        now_s=stamp_s(values.pop("END APC")),
        values=values,
    )


def _check_whole(frames: Sequence[bytes], values: dict[str, str]) -> None:
    """The header says how many bytes of records follow it, and END APC ends them."""
    header = _HEADER.fullmatch(values.pop("APC", ""))
    if header is None or not frames[0].startswith(b"APC "):
        msg = "begins its status with something else than an APC record"
        raise NisError(msg)
    size = sum(map(len, frames[1:]))
    if size != int(header[1]) or "END APC" not in values or not frames[-1].startswith(b"END APC"):
        msg = f"breaks its status off: {size} bytes of {int(header[1])}"
        raise NisError(msg)


def stamp_s(text: str) -> float | None:
    """Return a date of apcupsd in seconds since 1970; None for `N/A` and for other text that is not a date.

    Of the older style the zone is a name, which is passed over: only differences of two such dates mean anything.
    """
    found = _DATE.match(text)
    if found is not None:
        ahead_s = 0
        if found[7] is not None:
            ahead_s = (int(found[8]) * 60 + int(found[9])) * (-60 if found[7] == "-" else 60)
        year, month, day, *clock = found.groups()[:6]
        return _seconds((year, month, day), clock, ahead_s)
    found = _OLD_DATE.match(text)
    if found is None or found[1] not in _MONTHS:
        return None
    name, day, *clock, year = found.groups()
    return _seconds((year, _MONTHS.index(name) + 1, day), clock, 0)


def _seconds(day: Sequence[str | int], clock: Sequence[str], ahead_s: int) -> float | None:
    year, month, day_of_month = map(int, day)
    hour, minute, second = map(int, clock)
    try:
        # A leap second is written as 60, which datetime does not know.
        at = datetime(year, month, day_of_month, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None
    return at.timestamp() - ahead_s


def _short(text: str) -> str:
    """Return the beginning of a foreign text, harmless in a log."""
    printable = "".join(char if char.isprintable() else "?" for char in text.strip("\r\n\0"))
    return f"`{printable[:60]}`"
