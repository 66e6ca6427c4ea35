"""The trap port of a daemon: which cards it listens for, and whom a hint has polled."""

from collections.abc import Callable, Mapping, Sequence

from powerguard.clock import Clock
from powerguard.profiles.load import load_profiles
from powerguard.settings.schema import Settings
from powerguard.sources.base import Source
from powerguard.sources.snmp_options import SnmpOptions
from powerguard.sources.trap import Card, TrapListener


def trap_names() -> Mapping[str, str]:
    """Return what the profiles call a trap, by its OID. Reads files."""
    names: dict[str, str] = {}
    for profile in load_profiles().ranked():
        for oid, word in profile.traps.items():
            names.setdefault(profile.absolute(oid), str(word))
    return names


def trap_listener(
    settings: Settings, sources: Sequence[tuple[str, str, Source]], *, clock: Clock, wall: Callable[[], float]
) -> TrapListener | None:
    """Return the listener of the settings; None where they set no trap port. Opens nothing yet.

    sources: (ups, source name, poller), of which a hint polls those of the UPS that it names.
    """
    if settings.traps is None:
        return None

    def poll(ups: str) -> None:
        for name, _, source in sources:
            if name == ups:
                source.poll_now()

    return TrapListener(
        settings.traps,
        cards=[_card(name, settings) for name in dict.fromkeys(name for name, _, _ in sources)],
        poll=poll,
        clock=clock,
        wall=wall,
        names=trap_names,
    )


def _card(name: str, settings: Settings) -> Card:
    cards = [options for options in settings.ups[name].sources if isinstance(options, SnmpOptions)]
    return Card(
        ups=name,
        hosts=tuple(options.host for options in cards),
        communities=tuple(options.community for options in cards if options.community is not None),
    )
