"""Checks of `powerguard doctor` on the BMC: will it bring the host back, and does it admit anonymous users?

Only reads: the policy, what it can be set to, what powered the host on last, what it draws, the watchdog; over IPMI LAN
also what it answers without a login, and the privilege of powerguard's account.

It also checks what the BMC permits without a login: does it accept users without a password?

Three packets of IPMI over LAN, none of which is a login attempt, so no account can be locked by them. Each proposal
that is accepted leaves a half-open session behind, which the BMC gives up by itself.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from powerguard.clock import boottime_s
from powerguard.core.model.actions import CheckPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.effector import BmcEffector, BmcError, Probe
from powerguard.effectors.bmc.ipmi import ADMINISTRATOR, PowerRestorePolicy, RestartCause
from powerguard.effectors.bmc.watchdog import DrillFile, WatchdogEffector
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import BmcOptions

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
class AnonymousAccess:
    """The BMC's answers without a login; None if it did not answer.

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


async def look(host: str, port: int) -> AnonymousAccess:
    """Ask a BMC; 1.6 s at most, and the look-up of a name. Raises a group of OSError if no packet can be sent."""
    async with asyncio.TaskGroup() as group:
        cipher_0 = group.create_task(_opens(host, port, CIPHER_0))
        cipher_17 = group.create_task(_opens(host, port, CIPHER_17))
        capabilities = group.create_task(_ask(host, port, ask_capabilities(), login_status))
    login_bits = capabilities.result()
    return AnonymousAccess(
        cipher_0=cipher_0.result(),
        cipher_17=cipher_17.result(),
        anonymous=None if login_bits is None else bool(login_bits & 0x01),
        null_user=None if login_bits is None else bool(login_bits & 0x02),
    )


async def _opens(host: str, port: int, suite: tuple[int, int, int]) -> bool | None:
    tag = secrets.randbelow(256)
    packet = propose(suite, tag, secrets.token_bytes(4))
    return await _ask(host, port, packet, lambda answer: is_accepted(answer, tag))


async def _ask(host: str, port: int, packet: bytes, read: Callable[[bytes], _T | None]) -> _T | None:
    """Send a packet, and once more if no answer comes; other packets are ignored."""
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
        answer = self._read(data)
        if answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def error_received(self, exc: Exception) -> None:
        """The port is closed (ICMP): the same as silence, which the login reports sooner."""


def _checksum(data: bytes) -> bytes:
    """Two's complement of the sum (section 13.8)."""
    return bytes([-sum(data) & 0xFF])


LIMIT_S: Final = 5.0
_NAME: Final = "bmc.security"
_GUIDE: Final = "docs/guides/bmc.md"


async def findings(
    options: BmcOptions,
    *,
    folder: Path | None = None,
    limit_s: float = LIMIT_S,
    bmc: BmcEffector | None = None,
) -> list[Finding]:
    """Look, and say what was found. Four times limit_s at most.

    folder: the daemon's, where drills are kept. bmc: the caller's own, for which a refused login is not repeated here.
    """
    if options.kind == "none":
        return []
    if bmc is None:
        bmc = BmcEffector(options, limit_s=limit_s)
    try:
        seen = await bmc.probe(limit_s)
    except BmcError as error:
        found, answered = [Finding("bmc", "FAIL", str(error), "")], False
    else:
        found, answered = [_policy(seen, options, await bmc.power_watts(1.0))], True
    if options.watchdog and folder is not None:
        found.append(await _watchdog(options, folder, limit_s))
    if options.host is None:
        return found
    try:
        openness = await look(options.host, options.port)
    except* OSError:  # no route, no name: the probe has reported it if it matters
        openness = AnonymousAccess(cipher_0=None, cipher_17=None, anonymous=None, null_user=None)
    is_silent = openness.cipher_0 is None and openness.anonymous is None
    level = await bmc.account_level(limit_s) if answered and not is_silent else None
    return [*found, *_security(openness, level, options)]


async def _watchdog(options: BmcOptions, folder: Path, limit_s: float) -> Finding:
    """Could its watchdog be armed, and has a drill shown that it works here?"""
    method = WatchdogEffector(options, DrillFile(folder), limit_s=limit_s)
    try:
        detail = dict(
            await method.carry_out(
                CheckPowerOn(id="doctor", by_s=boottime_s() + limit_s, method=PowerOnMethod.WATCHDOG)
            )
        )
    except EffectorError as error:
        return Finding("bmc.watchdog", "WARN", f"blocked: {error}", _GUIDE)
    return Finding("bmc.watchdog", "PASS", f"drilled on this board ({detail['board']}), and free: armed in an outage")


def _policy(seen: Probe, options: BmcOptions, watts: float | None) -> Finding:
    """Will it power the host on?"""
    policy, wanted = seen.status.policy, PowerRestorePolicy.ALWAYS_ON
    if policy is wanted:
        draws = "" if watts is None else f"; the host draws {watts:.0f} W"
        text = f"power restore policy is always-on: the host comes back with the power{_last(seen)}{draws}"
        return Finding("bmc", "PASS", text)
    if seen.supported is not None and wanted not in seen.supported:
        return Finding(
            "bmc", "FAIL", f"policy is {policy}, and it cannot be set to always-on", "set it in the firmware"
        )
    if options.policy == "observe":
        return Finding("bmc", "FAIL", f"policy is {policy}: the host stays off", "set bmc.policy: ensure")
    if options.policy == "bracket":
        return Finding("bmc", "PASS", f"policy is {policy}; the armed daemon sets always-on when an outage begins")
    return Finding("bmc", "WARN", f"policy is {policy}; the armed daemon sets always-on", "start the daemon")


def _last(seen: Probe) -> str:
    """The cause of the last power-on, if the BMC reports it."""
    cause = seen.restart_cause
    text = "" if cause in {None, RestartCause.UNKNOWN} else f"; last powered on by {cause}"
    return f"{text}; its last power-off was a loss of AC" if seen.status.ac_failed else text


def _security(seen: AnonymousAccess, level: int | None, options: BmcOptions) -> list[Finding]:
    """Does it permit access without a login?"""
    found = []
    if seen.cipher_0:
        text = "cipher suite 0 is accepted over IPMI LAN: a user's name is enough to log in, without a password"
        found.append(
            Finding(_NAME, "FAIL", text, f"forbid it: ipmitool lan set 1 cipher_privs Xaaaaaaaaaaaaaa ({_GUIDE})")
        )
    if seen.anonymous:
        text = "anonymous login is on over IPMI LAN: no name and no password are needed"
        found.append(Finding(_NAME, "FAIL", text, "disable user 1: ipmitool user disable 1"))
    elif seen.null_user:
        text = "a user without a name may log in over IPMI LAN"
        found.append(Finding(_NAME, "WARN", text, "disable user 1: ipmitool user disable 1"))
    if seen.cipher_17 is False:
        text = "cipher suite 17 (SHA-256) is missing over IPMI LAN: the older hash is easier to attack"
        found.append(Finding(_NAME, "WARN", text, "update the firmware; use a random password of 16 to 20 bytes"))
    if level is not None and level >= ADMINISTRATOR:
        text = f"account {options.user} has more privilege than Operator (level {level}), which is not needed"
        found.append(Finding(_NAME, "WARN", text, "ipmitool channel setaccess 1 USER-ID privilege=3"))
    if found:
        return found
    if seen.cipher_0 is None and seen.anonymous is None:
        if options.kind == "ipmi-lan":
            return []
        return [Finding(_NAME, "PASS", "IPMI over LAN does not answer from here without a login")]
    return [Finding(_NAME, "PASS", "over IPMI LAN: no cipher suite 0, no anonymous login")]
