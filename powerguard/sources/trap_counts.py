"""What came to the trap port, counted: all that a hint leaves behind."""

import socket
import struct
from dataclasses import dataclass, field
from typing import Final

RESULTS: Final = (
    "hint",
    "repeated",
    "unknown_sender",
    "wrong_community",
    "unknown_engine",
    "unknown_user",
    "not_authentic",
    "out_of_time",
    "undecipherable",
    "discovery",
    "not_a_trap",
    "garbled",
    "over_limit",
)
"""hint: it made us poll. repeated: the same datagram once more. over_limit: not even read, for there were too many.
unknown_engine: version 3's usmStatsUnknownEngineIDs: the card's engine id is not in the settings. discovery: a card
asked for our engine id, as informs of version 3 begin."""

_SO_MEMINFO: Final = 55
_WORDS: Final = 9
_DROPS: Final = 8
"""socket(7), linux/sock_diag.h: SK_MEMINFO_VARS words of 32 bits, of which the last counts what found no room."""


@dataclass(slots=True)
class TrapCounts:
    """What has come since the settings were read. last_at_s: the newest hint of each UPS, CLOCK_BOOTTIME.

    where: address and port of the settings. listening: None until the port could be opened. closed_because: why it is
    not open.
    """

    results: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    last_at_s: dict[str, float] = field(default_factory=dict)
    answered: int = 0
    where: str = ""
    closed_because: str = "not opened yet"
    listening: socket.socket | None = None
    _dropped_before: int = 0

    @property
    def dropped(self) -> int:
        """Datagrams for which the kernel had no room, since the settings were read."""
        return self._dropped_before + self._dropped_now()

    def closed(self) -> None:
        """Keep the kernel's count of a socket that is about to be closed."""
        self._dropped_before += self._dropped_now()
        self.listening = None

    def _dropped_now(self) -> int:
        if self.listening is None or self.listening.fileno() < 0:
            return 0
        try:
            told = self.listening.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * _WORDS)
        except OSError:  # a kernel before 4.12
            return 0
        return int(struct.unpack(f"{_WORDS}I", told)[_DROPS]) if len(told) == 4 * _WORDS else 0
