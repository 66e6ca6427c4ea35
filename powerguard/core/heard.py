"""What is kept of those who tell: each source of a UPS, and the host's own network. Part of the state (`model`)."""

from dataclasses import dataclass, field

from powerguard.core.frozen import swift
from powerguard.core.readings import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What a source has shown that it measures; before that, it is no witness against utility.

    volts: it has told an input that is there. clock_s: the first seconds on battery that it told; None: none yet.
    clock: those seconds have moved.
    """

    volts: bool = False
    clock_s: float | None = None
    clock: bool = False


@swift
@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One of several sources of a UPS, as last heard. Kept only where there is more than one.

    reading, previous: its newest two; None until it has told anything.
    lost_since_s: since when it counts as lost; None while it answers.
    utility_seen: it has said utility since first contact, so a battery that it tells is news.
    battery_at_s: when the readings in a row that say battery began; None while it says anything else.
    gauges: charge (percent) and runtime (seconds) that it told then.
    measures: what it has shown that it measures.
    back_at_s: when it said utility after a battery that two of its readings told; its return is news.
    doubted: it says battery, and everything else says that this is not so.
    countdown_at_s, fsd_since_s, fsd_at_s, fsd_at_first: what it announces by itself, as in `Feed`; it stands until the
        same source takes it back.
    """

    source: str
    reading: Reading | None = None
    previous: Reading | None = None
    lost_since_s: float | None = None
    utility_seen: bool = False
    battery_at_s: float | None = None
    gauges: tuple[float | None, float | None] = (None, None)
    measures: Measures = field(default_factory=Measures)
    back_at_s: float | None = None
    doubted: bool = False
    countdown_at_s: float | None = None
    fsd_since_s: float | None = None
    fsd_at_s: float | None = None
    fsd_at_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Another UPS beside one that may be silent: it takes over when that one ends.

    share: load of the silent one for each of this one, as last seen while neither made a step. least: the least load
    that this one has told since the other was last heard, as a share of the rating. risen: it has told more than that
    since, or may have done so while nobody heard it. took: its load has risen by just what the other one carried, when
    the other one fell silent or when its battery was used up: that load has moved here, and must not be counted twice.
    """

    ups: str
    share: float
    least: float
    risen: bool = False
    took: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What has been seen of one of several UPSes since it was last heard (see `watch`).

    load: its own when it was last heard, as a share of the rating.
    spent: energy that it would have given meanwhile on battery, in full new batteries, counted until counted_s; None:
    not begun. lives: it is silent, and must have utility.
    """

    load: float
    others: tuple[Witness, ...]
    spent: float = 0.0
    counted_s: float | None = None
    lives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A part of this host's own network that went: between heard_s and at_s. part: as in `readings.NetworkSeen`."""

    part: str
    heard_s: float
    at_s: float
