"""Ports for those who cannot be given 0 and told afterwards which it was."""

import itertools
import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 10_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _end() -> int:
    """Return where the ports begin that the kernel hands out to whoever asks for any: 32768, unless somebody set it."""
    try:
        lowest = int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32_768
    return lowest if lowest > 2 * _FIRST else 65_536


_END: Final = _end()
# Not from `random` itself, which is seeded alike in all processes of a run.
_numbers: Final = itertools.count(random.SystemRandom().randrange(_END - _FIRST))


def free_port() -> int:
    """Return a port of 127.0.0.1, TCP and UDP, that nobody has, and that nobody is given who asks for any port.

    Between the look and the peer's own bind(2), and while a peer is killed and started anew, other tests open sockets
    by the hundred. No port comes twice in a process, and each process begins somewhere else.
    """
    while True:
        port = _FIRST + next(_numbers) % (_END - _FIRST)
        with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                tcp.bind(("127.0.0.1", port))
                udp.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
