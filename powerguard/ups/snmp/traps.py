"""The trap port: a trap or inform that names one of our UPSes makes its sources poll at once, and does nothing else.

A trap is a hint. Anyone who can send a datagram can forge it, so it never becomes a reading, never an action,
and what it costs is bounded: the kernel's buffer, a reader that takes turns, a few datagrams a second of each sender
that are looked into. How often a poll may follow another one is the source's own affair.

What came to the trap port, counted: all that a hint leaves behind.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from powerguard.clock import Clock
from powerguard.options import Secret, SecretError
from powerguard.ups.snmp.options import TrapOptions

if TYPE_CHECKING:
    from powerguard.ups.snmp.notification import Notification, TrapReceiver, TrapResult


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
            meminfo = self.listening.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * _WORDS)
        except OSError:  # a kernel before 4.12
            return 0
        return int(struct.unpack(f"{_WORDS}I", meminfo)[_DROPS]) if len(meminfo) == 4 * _WORDS else 0


log = structlog.get_logger(__name__)

_LONGEST: Final = 8192
"""Bytes of a datagram that is read; traps of UPS cards have some hundred."""
_ROOM_BYTES: Final = 1 << 20
"""Asked of the kernel, which gives what net.core.rmem_max allows."""
_AT_ONCE: Final = 256
"""Datagrams taken before other tasks have their turn: 1 ms."""
_TURN_S: Final = 0.02
_CALM_WAKES: Final = 100
"""More wakes a second than this, and the port is read by the clock: every 20 ms."""
_READ_PER_S, _READ_BURST = 20.0, 40.0
"""Datagrams of one sender that are looked into; strangers share one allowance."""
_REPEATED_S: Final = 10.0
_MOST_REMEMBERED: Final = 256
_RESOLVE_EVERY_S: Final = 300.0
_RESOLVE_S: Final = 5.0
_LOGGED_PER_S, _LOGGED_BURST = 0.2, 5.0
_MOST_REFUSALS_LOGGED: Final = 32
_FLOOD_LOGGED_EVERY_S: Final = 60.0

TrapNames = Callable[[], Mapping[str, str]]
"""Trap OIDs and what they are called; reads files, so it is called in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The card of one UPS, as it may be known by a trap. hosts: addresses or names; communities: its own ones."""

    ups: str
    hosts: Sequence[str] = ()
    communities: Sequence[Secret] = ()


class _Allowance:
    """So many a second, and a few more at once. It has no clock: the caller passes the time."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst, self._left, self._at_s = per_s, burst, burst, 0.0

    def take(self, now_s: float) -> bool:
        """Whether one more is allowed now."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TrapListener:
    """Listens for traps. poll: makes the sources of one UPS poll at once.

    wall: Unix seconds, of which version 3 takes the number of our starts. names: what traps are called in the log.
    """

    def __init__(
        self,
        options: TrapOptions,
        *,
        cards: Iterable[Card],
        poll: Callable[[str], None],
        clock: Clock,
        wall: Callable[[], float],
        names: TrapNames = dict,
    ) -> None:
        """Open nothing yet."""
        self._options = options
        self.counts = TrapCounts(where=self.where)
        self._cards = tuple(cards)
        self._poll = poll
        self._clock = clock
        self._wall = wall
        self._load_names = names
        self._names: Mapping[str, str] = {}
        self._socket: socket.socket | None = None
        self._later: asyncio.TimerHandle | None = None
        self._wakes, self._wakes_since_s = 0, 0.0
        self._by_address: dict[str, set[str]] = {}
        self._allowances: dict[str, _Allowance] = {}
        self._strangers = _Allowance(_READ_PER_S, _READ_BURST)
        self._community: bytes | None = None
        self._by_community: dict[bytes, set[str]] = {}
        self._any_community = options.community is None
        self._receiver: TrapReceiver | None = None
        self._remembered: dict[int, float] = {}
        self._log_allowances: dict[str, tuple[_Allowance, int]] = {}
        self._refusals: set[tuple[str, str]] = set()
        self._flood_logged_s = -_FLOOD_LOGGED_EVERY_S

    @property
    def where(self) -> str:
        """The address as the settings have it."""
        return f"{self._options.listen} port {self._options.port}"

    @property
    def port(self) -> int:
        """The port that is listened on; 0 when it is not open."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Listen until cancelled. Raises OSError when the address cannot be had."""
        try:
            own = self._open()
        except OSError as error:
            self.counts.closed_because = error.strerror or str(error)
            raise
        try:
            await asyncio.to_thread(self._prepare)
            await self._look_up()
            self._socket = self.counts.listening = own
            asyncio.get_running_loop().add_reader(own.fileno(), self._readable)
            log.info("traps_listening", listen=self._options.listen, port=self.port, addresses=len(self._by_address))
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RESOLVE_EVERY_S):
                        await asyncio.Event().wait()
                await self._look_up()
        finally:
            asyncio.get_running_loop().remove_reader(own.fileno())
            if self._later is not None:
                self._later.cancel()
            self.counts.closed()
            self._socket = None
            own.close()

    # --- Getting ready ------------------------------------------------------------------------------------------

    def _open(self) -> socket.socket:
        address = ipaddress.ip_address(self._options.listen)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        own = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            if family == socket.AF_INET6:
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
            own.bind((str(address), self._options.port))
        except OSError:
            own.close()
            raise
        return own

    def _prepare(self) -> None:
        """Read secrets, make keys of them, load names: all that takes time. For a thread."""
        self._names = self._load_names()
        if self._options.community is not None:
            self._community = _read(self._options.community, "traps.community")
        for ups, secret in self._options.communities.items():
            own = _read(secret, f"traps.communities, {ups}")
            if own is not None:
                self._by_community.setdefault(own, set()).add(ups)
        for card in self._cards:
            for secret in card.communities:
                with contextlib.suppress(SecretError):  # the source that needs it says so
                    self._by_community.setdefault(secret.read(), set()).add(card.ups)
        # Here, for a host without traps loads none of pysnmp.
        from powerguard.ups.snmp.notification import TrapReceiver  # noqa: PLC0415

        # Unix seconds grow from start to start as RFC 3414 wants of a boot count, and need no file to be kept in.
        boots = int(self._wall()) & 0x7FFFFFFE
        receiver = TrapReceiver(engine_id=engine_id(self._options.port), boots=boots, clock=self._clock)
        for problem in receiver.add(self._options.users):
            log.error("trap_setting_refused", because=problem)
        self._receiver = receiver

    async def _look_up(self) -> None:
        """Find the addresses of all cards; of a name that cannot be looked up the old ones are kept."""
        found: dict[str, set[str]] = {}
        for ups, listed in self._options.addresses.items():
            for address in listed:
                found.setdefault(str(ipaddress.ip_address(address)), set()).add(ups)
        for card in self._cards:
            for host in card.hosts:
                for address in await _addresses(host) or [a for a, who in self._by_address.items() if card.ups in who]:
                    found.setdefault(address, set()).add(card.ups)
        self._by_address = found
        allowances = {a: self._allowances.get(a) or _Allowance(_READ_PER_S, _READ_BURST) for a in found}
        # As a socket of both families writes an IPv4 sender.
        self._allowances = allowances | {f"::ffff:{a}": one for a, one in allowances.items() if ":" not in a}

    # --- Taking datagrams ---------------------------------------------------------------------------------------

    def _readable(self) -> None:
        now_s = self._clock()
        if now_s - self._wakes_since_s >= 1.0:
            self._wakes, self._wakes_since_s = 0, now_s
        self._wakes += 1
        if self._drain() >= _AT_ONCE or self._wakes > _CALM_WAKES:
            # A wake for each datagram would cost more than all of them.
            loop = asyncio.get_running_loop()
            if self._socket is not None:
                loop.remove_reader(self._socket.fileno())
                self._later = loop.call_later(_TURN_S, self._in_turn)

    def _in_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if self._drain() > _CALM_WAKES * _TURN_S:
            self._later = loop.call_later(_TURN_S, self._in_turn)
        elif self._socket is not None:
            self._wakes, self._wakes_since_s = 0, self._clock()
            loop.add_reader(self._socket.fileno(), self._readable)

    def _drain(self) -> int:
        """Take what has come, at most _AT_ONCE; returns how many those were."""
        own, now_s = self._socket, self._clock()
        over = 0
        taken = 0
        while own is not None and taken < _AT_ONCE:
            try:
                data, sender = own.recvfrom(_LONGEST + 1)
            except OSError:  # nothing more; or an ICMP error, which says nothing of what is to come
                break
            taken += 1
            if self._allowances.get(sender[0], self._strangers).take(now_s):
                self.take(data, sender)
            else:
                over += 1
        if over:
            self.counts.results["over_limit"] += over
            if now_s - self._flood_logged_s >= _FLOOD_LOGGED_EVERY_S:
                self._flood_logged_s = now_s
                log.warning("traps_flooded", unread=self.counts.results["over_limit"], because="too many to look into")
        return taken

    def take(self, data: bytes, sender: tuple[str, int] | tuple[str, int, int, int]) -> None:
        """Judge one datagram, and count it. Never raises."""
        address = plain_address(sender[0])
        heard = self._received(data)
        meant = self._by_address.get(address, set())
        result, notification = heard.result, heard.notification
        if heard.community is not None and notification is not None:
            result, meant = self._named(heard.community, notification, meant)
        elif heard.ups is not None:
            meant = {heard.ups}
        if result == "hint" and not meant:
            result = "unknown_sender"
        if result == "hint" and self._is_repeated(data):
            result = "repeated"
        self.counts.results[result] += 1
        if result == "hint":
            for ups in meant:
                self._poll(ups)
        if heard.answer is not None and meant:
            self._send(heard.answer, sender)
        if result == "hint":
            self._log_trap(meant, address, notification)
        elif result != "repeated":
            self._log_refused(result, address, heard.engine_id)

    def _received(self, data: bytes) -> "TrapResult":
        """Read one datagram. Never raises."""
        from powerguard.ups.snmp.engine import MessageError  # noqa: PLC0415 - see `_prepare`
        from powerguard.ups.snmp.notification import NotATrapError, TrapResult  # noqa: PLC0415

        try:
            if self._receiver is not None and len(data) <= _LONGEST:
                return self._receiver.receive(data)
        except NotATrapError:
            return TrapResult(result="not_a_trap")
        except MessageError:
            pass
        return TrapResult(result="garbled")

    def _named(self, community: bytes, notification: "Notification", by_sender: set[str]) -> tuple[str, set[str]]:
        """Say which UPSes a message of version 1 or 2c means: its sender's, those it names, those of its community."""
        by_community = self._by_community.get(community, set())
        if not self._any_community and community != self._community and not by_community:
            return "wrong_community", set()
        meant = set(by_sender) | by_community
        if notification.agent_address is not None:
            meant |= self._by_address.get(notification.agent_address, set())
        if notification.community is not None:
            meant |= self._by_community.get(notification.community, set())
        return "hint", meant

    def _is_repeated(self, data: bytes) -> bool:
        """Whether the same bytes came a moment ago: twice by the network, by two relays, or by a replay."""
        now_s, key = self._clock(), hash(data)
        before_s = self._remembered.pop(key, None)
        self._remembered[key] = now_s
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return before_s is not None and now_s - before_s < _REPEATED_S

    def _send(self, answer: bytes, sender: tuple[str, int] | tuple[str, int, int, int]) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # who asked asks again
            self._socket.sendto(answer, sender)
            self.counts.answered += 1

    # --- Reports ------------------------------------------------------------------------------------------------

    def _log_trap(self, meant: set[str], address: str, notification: "Notification | None") -> None:
        now_s = self._clock()
        trap_oid = "" if notification is None else notification.trap_oid
        for ups in sorted(meant):
            self.counts.last_at_s[ups] = now_s
            allowance, unlogged = self._log_allowances.get(ups, (None, 0))
            allowance = allowance or _Allowance(_LOGGED_PER_S, _LOGGED_BURST)
            if allowance.take(now_s):
                log.info(
                    "trap_received",
                    ups=ups,
                    name=self.name_of(trap_oid),
                    trap=trap_oid,
                    sender=address,
                    unlogged=unlogged,
                )
                unlogged = -1
            self._log_allowances[ups] = (allowance, unlogged + 1)

    def name_of(self, trap_oid: str) -> str:
        """Return what a trap is called; "unknown" where no profile knows it. RFC 1628's come with and without a 0."""
        head, _, last = trap_oid.rpartition(".")
        for oid in (trap_oid, f"{head.removesuffix('.0')}.{last}", f"{head}.0.{last}"):
            if oid in self._names:
                return self._names[oid]
        return "unknown"

    def _log_refused(self, result: str, address: str, engine: bytes) -> None:
        """Log once for each sender why its traps have no effect. Senders can be made up: their number is limited."""
        if result == "discovery" or (result, address) in self._refusals or len(self._refusals) >= _MOST_REFUSALS_LOGGED:
            return
        self._refusals.add((result, address))
        because = _WHY[result]
        if result == "unknown_engine":
            because = f"engine id {engine[:32].hex()} is {because}"
        log.warning("trap_refused", sender=address, result=result, because=because)


def _read(secret: Secret, where: str) -> bytes | None:
    try:
        return secret.read()
    except SecretError as error:
        log.error("trap_setting_refused", because=f"{where}: {error}")  # noqa: TRY400 - reported in full
        return None


_WHY: Final = {
    "unknown_sender": "no snmp source has this address; set traps.addresses if the card sends from another one",
    "wrong_community": "its community is not that of traps.community",
    "unknown_engine": "not in traps.users: write it under engines, or let the card send informs",
    "unknown_user": "traps.users has no such user for this engine id",
    "not_authentic": "its digest or security level is not that of the user in traps.users",
    "out_of_time": "the inform was sent long ago, or the card counts our time otherwise; powerguard sends it our time",
    "undecipherable": "the privacy passphrase or protocol is not that of the user in traps.users",
    "not_a_trap": "it is SNMP, but neither trap nor inform",
    "garbled": "it is not an SNMP message",
}


def plain_address(address: str) -> str:
    """Return an address as `ipaddress` writes it, IPv4 out of its IPv6 form, without an interface."""
    if ":" not in address:
        return address
    address = address.partition("%")[0]
    mapped = address.removeprefix("::ffff:")
    return mapped if "." in mapped else address


async def _addresses(host: str) -> list[str]:
    """Return the addresses of a host; none when the name service does not answer in time."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(plain_address(str(one[4][0])) for one in found))


def engine_id(port: int, machine_id: Path = Path("/etc/machine-id")) -> bytes:
    """Return our own engine id (RFC 3411 SnmpEngineID, format 5): the same after every start of this machine."""
    try:
        machine = machine_id.read_bytes()
    except OSError:
        machine = socket.gethostname().encode()
    return b"\x80\x00\x00\x00\x05" + hashlib.sha256(b"powerguard traps %d " % port + machine).digest()[:12]
