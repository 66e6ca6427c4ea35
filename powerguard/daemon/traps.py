"""The trap port of a daemon: which cards it listens for, and whom a hint has polled."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from powerguard.clock import Clock
from powerguard.options import Secret
from powerguard.settings.schema import Settings
from powerguard.sources.base import Source
from powerguard.sources.snmp_options import SnmpOptions

if TYPE_CHECKING:
    from powerguard.sources.trap import TrapListener


class _Known(TypedDict):
    """By what a trap may name a card: see `trap.Card`."""

    hosts: tuple[str, ...]
    communities: tuple[Secret, ...]


def trap_names() -> Mapping[str, str]:
    """Return what the profiles call a trap, by its OID. Reads files."""
    from powerguard.profiles.load import load_profiles  # noqa: PLC0415 - nothing else here needs the profiles

    names: dict[str, str] = {}
    for profile in load_profiles().ranked():
        for oid, word in profile.traps.items():
            names.setdefault(profile.absolute(oid), str(word))
    return names


def trap_listener(
    settings: Settings, sources: Sequence[tuple[str, str, Source]], *, clock: Clock, wall: Callable[[], float]
) -> "TrapListener | None":
    """Return the listener of the settings; None where they set no trap port. Opens nothing yet.

    sources: (ups, source name, poller), of which a hint polls those of the UPS that it names.
    """
    if settings.traps is None:
        return None
    from powerguard.sources.trap import Card, TrapListener  # noqa: PLC0415 - a host without traps loads none of it

    def poll(ups: str) -> None:
        for name, _, source in sources:
            if name == ups:
                source.poll_now()

    return TrapListener(
        settings.traps,
        cards=[Card(ups=ups, **_known_by(settings, ups)) for ups in dict.fromkeys(ups for ups, _, _ in sources)],
        poll=poll,
        clock=clock,
        wall=wall,
        names=trap_names,
    )


def _known_by(settings: Settings, ups: str) -> _Known:
    cards = [options for options in settings.ups[ups].sources if isinstance(options, SnmpOptions)]
    return {
        "hosts": tuple(options.host for options in cards),
        "communities": tuple(options.community for options in cards if options.community is not None),
    }
