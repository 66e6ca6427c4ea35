"""Faults around the daemon, drawn beforehand: peers that hang, lie and refuse, disks, clocks, people, kill -9.

`world.scene` draws what is wrong with batteries, gauges and trainers; here is what only the real loop, bulkhead and
journal can meet.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from powerguard.sim.world.chance import stream


class Manner(StrEnum):
    """How a peer answers an order."""

    WELL = "well"
    LATE = "late"
    """Well, but only after seconds."""
    REFUSE = "refuse"
    HANG = "hang"
    BREAK = "break"
    """It raises an unexpected exception."""
    STRAY = "stray"
    """It hangs, and swallows its cancellation."""
    LIE = "lie"
    """It says that it did what it did not."""
    LOST = "lost"
    """It obeys, and its answer is lost."""


class Moment(StrEnum):
    """Where a process can be killed: between any two turns of its loop, and around whatever it does to the world."""

    TURN = "turn"
    WRITE_BEGINS = "write_begins"
    WRITE_ENDED = "write_ended"
    ACTION_BEGINS = "action_begins"
    WAY = "way"
    """Before and after each step in which a power-on method, or the BMC's policy, is armed, changed or disarmed."""


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 at the count-th such moment of a life; away_s: until the daemon runs again."""

    moment: Moment
    count: int
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mischief:
    """The faults of one outage. Times are seconds since the first cut.

    kills: one for each life, in order; lives after the last end well. crash: the host dies of itself then, and boots.
    lies: moments at which one single reading says battery. wall_steps: (when, by how much). hung: the disk of the
    journal; full: it takes nothing. manners: by word of the peer, its answers in order; WELL after the last.
    words: (when, what) of an operator: "abort", "maintenance", "checkpoint", "stop" (SIGTERM).
    late_abort: a person calls the shutdown off when it is too late.
    """

    kills: tuple[Kill, ...] = ()
    crash_s: float | None = None
    lies: tuple[float, ...] = ()
    wall_steps: tuple[tuple[float, float], ...] = ()
    hung: tuple[tuple[float, float], ...] = ()
    full: tuple[tuple[float, float], ...] = ()
    manners: tuple[tuple[str, tuple[Manner, ...]], ...] = ()
    words: tuple[tuple[float, str], ...] = ()
    late_abort: bool = False

    def manner_of(self, peer: str, call: int) -> Manner:
        """Return how this peer answers its call-th order (from 0)."""
        for name, manners in self.manners:
            if name == peer and call < len(manners):
                return manners[call]
        return Manner.WELL

    @property
    def people(self) -> bool:
        """Another party interferes with the decision."""
        return any(word in ("abort", "maintenance") for _, word in self.words)


PEERS: tuple[tuple[str, tuple[Manner, ...]], ...] = (
    ("bmc", (Manner.LATE, Manner.REFUSE, Manner.HANG, Manner.BREAK, Manner.STRAY, Manner.LIE)),
    ("disks", (Manner.LATE, Manner.REFUSE, Manner.HANG, Manner.STRAY)),
    ("host", (Manner.REFUSE, Manner.HANG, Manner.BREAK)),
    ("resume", (Manner.REFUSE, Manner.HANG, Manner.BREAK)),
    ("start", (Manner.REFUSE, Manner.HANG)),
    ("gpu", (Manner.REFUSE, Manner.HANG, Manner.LATE)),
    ("checkpoint", (Manner.BREAK, Manner.REFUSE)),
    ("signals", (Manner.REFUSE, Manner.HANG, Manner.LATE)),
    ("check", (Manner.REFUSE, Manner.HANG, Manner.LATE, Manner.BREAK)),
)
"""The faults that each peer may show, by the peer's word."""

_ANYHOW = (Manner.LATE, Manner.REFUSE, Manner.HANG, Manner.BREAK, Manner.STRAY, Manner.LIE, Manner.LOST)
METHODS: tuple[tuple[str, tuple[Manner, ...]], ...] = (
    ("output", _ANYHOW),
    ("rtc", _ANYHOW),
    ("sentinel", _ANYHOW),
    ("watchdog", _ANYHOW),
    ("look", (Manner.LATE, Manner.REFUSE, Manner.HANG)),
    ("reboot", (Manner.REFUSE, Manner.HANG)),
)
"""The same of the power-on methods, if there are any."""

_MOST = {"start": 2}
_MOST_OTHERS = 4
"""How many of its orders a peer may spoil: one that fails three times is left to a person, by design."""
_ANYWHERE = (Moment.TURN, Moment.WRITE_BEGINS, Moment.WRITE_ENDED, Moment.ACTION_BEGINS)
_LATE_ABORT = 0.10
_KILLED, _CRASHED, _LIED, _STEPPED, _DISK, _PEERS, _PEOPLE = 0.35, 0.02, 0.10, 0.10, 0.10, 0.30, 0.08


def draw(seed: int, *, faults: bool, methods: bool) -> Mischief:
    """Draw what breaks in one outage; without faults nothing does. methods: power-on methods may break, too."""
    if not faults:
        return Mischief()
    disk = stream(seed, "loop disk")
    windows = _windows(disk) if disk.random() < _DISK else ()
    is_full = disk.random() < 0.5
    crash = stream(seed, "loop crash")
    kills, manners = _kills(stream(seed, "loop kills")), _manners(stream(seed, "loop peers"), PEERS)
    if methods:
        # A life that dies at a power-on method dies only there: in another life there is none to arm.
        kills = _method_kills(stream(seed, "loop way kills")) or kills
        manners += _manners(stream(seed, "loop ways"), METHODS)
    return Mischief(
        kills=kills,
        crash_s=crash.uniform(1.0, 900.0) if crash.random() < _CRASHED else None,
        lies=_lies(stream(seed, "loop lies")),
        wall_steps=_wall_steps(stream(seed, "loop wall")),
        hung=() if is_full else windows,
        full=windows if is_full else (),
        manners=manners,
        words=_words(stream(seed, "loop people")),
        late_abort=stream(seed, "loop late abort").random() < _LATE_ABORT,
    )


def _kills(chance: Random) -> tuple[Kill, ...]:
    if chance.random() >= _KILLED:
        return ()
    kills = []
    for _ in range(chance.randint(1, 4)):
        moment = chance.choice(_ANYWHERE)
        # Turns come by thousands, writes and actions by dozens: early ones of each are where the story is.
        most = {Moment.TURN: 8000, Moment.WRITE_BEGINS: 60, Moment.WRITE_ENDED: 60, Moment.ACTION_BEGINS: 12}[moment]
        count = 1 + int(most * chance.random() ** 2)
        kills.append(Kill(moment, count, chance.choice((0.5, 2.0, 5.0, 15.0))))
    return tuple(kills)


def _method_kills(chance: Random) -> tuple[Kill, ...]:
    if chance.random() >= _KILLED:
        return ()
    aways = (0.5, 2.0, 5.0, 15.0)
    return tuple(Kill(Moment.WAY, chance.randint(1, 12), chance.choice(aways)) for _ in range(chance.randint(1, 3)))


def _lies(chance: Random) -> tuple[float, ...]:
    return (chance.uniform(-20.0, -8.0),) if chance.random() < _LIED else ()


def _wall_steps(chance: Random) -> tuple[tuple[float, float], ...]:
    if chance.random() >= _STEPPED:
        return ()
    steps_s = (-1e6, -3600.0, -60.0, 60.0, 3600.0, 1e6)
    return tuple((chance.uniform(-10.0, 900.0), float(chance.choice(steps_s))) for _ in range(chance.randint(1, 3)))


def _windows(chance: Random) -> tuple[tuple[float, float], ...]:
    begin_s = chance.uniform(-5.0, 600.0)
    return ((begin_s, begin_s + chance.choice((0.3, 2.0, 20.0, 300.0))),)


def _manners(
    chance: Random, peers: tuple[tuple[str, tuple[Manner, ...]], ...]
) -> tuple[tuple[str, tuple[Manner, ...]], ...]:
    found = []
    for peer, manners in peers:
        if chance.random() < _PEERS:
            choices, most = (Manner.WELL, *manners), _MOST.get(peer, _MOST_OTHERS)
            found.append((peer, tuple(chance.choice(choices) for _ in range(chance.randint(1, most)))))
    return tuple(found)


def _words(chance: Random) -> tuple[tuple[float, str], ...]:
    if chance.random() >= _PEOPLE:
        return ()
    return ((chance.uniform(-5.0, 900.0), chance.choice(("abort", "maintenance", "checkpoint", "stop"))),)
