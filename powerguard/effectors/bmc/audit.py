"""What anybody on its network can find out about a BMC without logging in: does it take who has no password?

Three packets of IPMI over LAN, none of which is a login attempt, so no account can be locked by them. Each proposal
that is accepted leaves a half-open session behind, which the BMC gives up by itself.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

_RMCP: Final = b"\x06\x00\xff\x07"
_OPEN_SESSION_REQUEST, _OPEN_SESSION_RESPONSE = 0x10, 0x11
_TRIES: Final = 2
_WAIT_S: Final = 0.8
_T = TypeVar("_T")

CIPHER_0: Final = (0, 0, 0)
"""No authentication, no integrity, no confidentiality (IPMI 2.0 table 22-20)."""
CIPHER_17: Final = (3, 4, 1)
"""RAKP-HMAC-SHA256, HMAC-SHA256-128, AES-CBC-128 (the same table, revision 1.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Openness:
    """What it answers to strangers; None where it did not answer that.

    cipher_0: a session without any authentication is opened. cipher_17: one with SHA-256 is.
    anonymous: the user without a name and without a password may log in; null_user: without a name.
    """

    cipher_0: bool | None
    cipher_17: bool | None
    anonymous: bool | None
    null_user: bool | None


def propose(suite: tuple[int, int, int], tag: int, console: bytes) -> bytes:
    """RMCP+ Open Session Request (IPMI 2.0 section 13.17). console: four bytes that name our side."""
    payload = bytes([tag, 0, 0, 0]) + console
    for kind, algorithm in enumerate(suite):
        payload += bytes([kind, 0, 0, 8, algorithm, 0, 0, 0])
    return _RMCP + bytes([0x06, _OPEN_SESSION_REQUEST]) + bytes(8) + len(payload).to_bytes(2, "little") + payload


def is_accepted(packet: bytes, tag: int) -> bool | None:
    """Read an RMCP+ Open Session Response (section 13.18); None where it is something else."""
    if packet[:4] != _RMCP or packet[4:6] != bytes([0x06, _OPEN_SESSION_RESPONSE]) or len(packet) < 18:
        return None
    return packet[17] == 0 if packet[16] == tag else None


def ask_capabilities() -> bytes:
    """Get Channel Authentication Capabilities (section 22.13) of this channel, without a session."""
    head, body = b"\x20\x18", b"\x81\x00\x38\x8e\x04"
    message = head + _checksum(head) + body + _checksum(body)
    return _RMCP + bytes(9) + bytes([len(message)]) + message


def login_status(packet: bytes) -> int | None:
    """Byte 4 of the answer: bit 0 anonymous login, bit 1 users without a name. None where it is something else."""
    if packet[:4] != _RMCP or packet[4:5] != b"\x00" or len(packet) < 24:
        return None
    message = packet[14 : 14 + packet[13]]
    if len(message) < 10 or message[5] != 0x38 or message[6] != 0:
        return None
    return message[9]


async def look(host: str, port: int) -> Openness:
    """Ask a BMC; 1.6 s at most, and the look-up of a name. Raises a group of OSError where nothing can be sent."""
    async with asyncio.TaskGroup() as group:
        cipher_0 = group.create_task(_opens(host, port, CIPHER_0))
        cipher_17 = group.create_task(_opens(host, port, CIPHER_17))
        capabilities = group.create_task(_ask(host, port, ask_capabilities(), login_status))
    told = capabilities.result()
    return Openness(
        cipher_0=cipher_0.result(),
        cipher_17=cipher_17.result(),
        anonymous=None if told is None else bool(told & 0x01),
        null_user=None if told is None else bool(told & 0x02),
    )


async def _opens(host: str, port: int, suite: tuple[int, int, int]) -> bool | None:
    tag = secrets.randbelow(256)
    packet = propose(suite, tag, secrets.token_bytes(4))
    return await _ask(host, port, packet, lambda answer: is_accepted(answer, tag))


async def _ask(host: str, port: int, packet: bytes, read: Callable[[bytes], _T | None]) -> _T | None:
    """Send a packet, once more where nothing comes back; what answers something else is passed over."""
    answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Listener(read, answer), remote_addr=(host, port)
    )
    try:
        for _ in range(_TRIES):
            transport.sendto(packet)
            await asyncio.wait([answer], timeout=_WAIT_S)
            if answer.done():
                return answer.result()
        return None
    finally:
        transport.close()


class _Listener(asyncio.DatagramProtocol):
    """Keeps the first packet that can be read."""

    def __init__(self, read: Callable[[bytes], _T | None], answer: "asyncio.Future[_T]") -> None:
        self._read = read
        self._answer = answer

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the socket is connected
        told = self._read(data)
        if told is not None and not self._answer.done():
            self._answer.set_result(told)

    def error_received(self, exc: Exception) -> None:
        """Nobody listens there (ICMP): the same as silence, only sooner told by the login."""


def _checksum(told: bytes) -> bytes:
    """Two's complement of the sum (section 13.8)."""
    return bytes([-sum(told) & 0xFF])
