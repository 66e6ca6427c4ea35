"""What has been armed or changed so that the host comes back, and is to be undone: plain data, as in `model`."""

from dataclasses import dataclass

from powerguard.core.actions import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """A way back that is armed, or may be: it stands until its end has been confirmed.

    outage: for which; "" where nobody knows (`ways.unknown`). ups: of way OUTPUT, else "". at_s: when it was last
    ordered, or ordered away; acts_at_s: when it acts, not sooner. order: id in flight. confirmed: read back from who
    holds it. returns: of way OUTPUT, what the UPS does when utility returns in its countdown: cycles, aborts,
    stays_off or unknown; "" until told.
    leaving: it is being taken back, or could not be. kept: the host is being stopped by somebody else, so that it
    stands until the daemon starts again.
    """

    way: Way
    outage: str
    at_s: float
    acts_at_s: float
    ups: str = ""
    order: str | None = None
    confirmed: bool = False
    returns: str = ""
    leaving: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The BMC's policy as an outage found it, to be put back once training runs; not before at_s. order: in flight."""

    policy: str
    at_s: float = 0.0
    order: str | None = None
