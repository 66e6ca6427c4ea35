"""What is known of the BMC's watchdog on this board: whether a drill has shown that it powers the host on again.

One small file in the daemon's state folder, replaced as a whole. A file that is absent, or makes no sense, is a board
that was never drilled: nothing is armed then.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from powerguard.durable import replace_file
from powerguard.effectors.bmc.timer import Device

FILE: Final = "bmc-watchdog.json"
DMI: Final = Path("/sys/class/dmi/id")
_MAX_BYTES: Final = 16384

State = Literal["pending", "passed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What a drill holds for, and for nothing else: mainboard and BMC, with their firmware.

    manufacturer, product, firmware: Get Device ID (IPMI 2.0 section 20.1), auxiliary revision included. name, bios: of
    /sys/class/dmi/id (SMBIOS types 2 and 0); "" where the firmware does not tell.
    """

    manufacturer: int
    product: int
    firmware: str
    name: str
    bios: str

    @classmethod
    def read(cls, device: Device, dmi: Path = DMI) -> "Board":
        """Put together what the BMC has said and what the kernel knows; files of the kernel's, in memory."""
        firmware = device.firmware + (f" ({device.auxiliary})" if device.auxiliary else "")
        name, bios = _words(dmi, "board_vendor", "board_name"), _words(dmi, "bios_vendor", "bios_version")
        return cls(manufacturer=device.manufacturer, product=device.product, firmware=firmware, name=name, bios=bios)

    def unlike(self, other: "Board") -> str:
        """Say in what another board differs from this one, for people; "" where it is the same."""
        pairs = ((each.name, getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return ", ".join(f"{name} was {ours}, is {theirs}" for name, ours, theirs in pairs if ours != theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """The last drill. because: why it is what it is.

    boot_id: the boot that was powered off. armed_wall_s: Unix seconds when the timer was started, to fire in_s later.
    judged_wall_s: when it was seen how it went; None while pending.
    """

    state: State
    board: Board
    boot_id: str
    armed_wall_s: float
    in_s: float
    because: str = ""
    judged_wall_s: float | None = None

    def judged(self, *, passed: bool, because: str, wall_s: float) -> "Drill":
        """Return it with its end."""
        return replace(self, state="passed" if passed else "failed", because=because, judged_wall_s=wall_s)


class DrillFileError(Exception):
    """The file cannot be read or written, or makes no sense: what, where, and what would be right."""


class DrillFile:
    """The file; what was read or written last is remembered, as a disk may hang when it counts. Calls block."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._known: Drill | None = None

    def load(self) -> Drill | None:
        """Return the last drill; None where there never was one. Raises DrillFileError."""
        if self._known is None:
            try:
                with self.path.open("rb") as file:
                    told = file.read(_MAX_BYTES)
            except FileNotFoundError:
                return None
            except OSError as error:
                msg = f"{self.path}: cannot be read: {error.strerror} (it is the daemon's own: ls -l {self.path})"
                raise DrillFileError(msg) from None
            self._known = self._decoded(told)
        return self._known

    def store(self, drill: Drill) -> None:
        """Replace it, durably and whole. Raises DrillFileError."""
        text = json.dumps({"schema_version": 1, **asdict(drill)}, indent=2) + "\n"
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            msg = f"{self.path}: cannot be written: {error.strerror} (df {self.path.parent})"
            raise DrillFileError(msg) from None
        self._known = drill

    def _decoded(self, told: bytes) -> Drill:
        try:
            plain = json.loads(told)
            version, board = plain.pop("schema_version"), Board(**plain.pop("board"))
            drill = Drill(board=board, **plain)
            _check(drill, version)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            msg = f"{self.path}: is not what powerguard wrote, so no drill counts: remove it, and drill again"
            raise DrillFileError(msg) from None
        return drill


def _check(drill: Drill, version: object) -> None:
    """Raise TypeError or ValueError for a value that could not be ours."""
    board, judged_wall_s = drill.board, drill.judged_wall_s
    texts: tuple[Any, ...] = (drill.boot_id, drill.because, board.firmware, board.name, board.bios)
    numbers: tuple[Any, ...] = (drill.armed_wall_s, drill.in_s, *(() if judged_wall_s is None else (judged_wall_s,)))
    if not all(isinstance(each, str) for each in texts) or type(board.manufacturer) is not int:
        raise TypeError(texts)
    if type(board.product) is not int or not all(type(each) in (int, float) for each in numbers):
        raise TypeError(numbers)
    is_state = version == 1 and drill.state in ("pending", "passed", "failed")
    if not is_state or not all(math.isfinite(each) for each in numbers):
        raise ValueError(numbers)


def _words(dmi: Path, *names: str) -> str:
    """What the kernel knows under these names; what it does not know is left out."""
    found = []
    for name in names:
        try:
            found.append((dmi / name).read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue
    return " ".join(word for word in found if word)
