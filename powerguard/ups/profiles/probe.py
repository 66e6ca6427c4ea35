"""Which families a device speaks: found by asking it, since what cards say of themselves is often wrong.

Seen on real cards: the sysObjectID of net-snmp on Linux, of the UPS-MIB itself, of the maker's PDUs, of another maker.
"""

from collections.abc import Sequence

from powerguard.core.model.events import OutputSource
from powerguard.ups.profiles.schema import Answers, BatteryStatusSource, OutputSourceSource, Profile, Tables
from powerguard.ups.profiles.vocabulary import NUMBERS, Answer, Missing, Oid, below

_LONGEST_DESCR = 200
_MOST_STATES = 255
"""Makers count their states from 0 or 1; a 0, and what is larger, often means "not there"."""


def fits(profile: Profile, answers: Answers) -> bool:
    """Whether the answers to `profile.mandatory()`, or a whole walk, are of this family.

    The output source must be a listed value. Of a UPS's numbers it is enough that the object exists: an empty battery
    must not make a family unknown. A PDU's must be believable: one maker's generations share tables and fill them with
    -1.
    """
    return not unmet(profile, answers)


def fits_but_for_its_state(profile: Profile, answers: Answers, sys_object_id: str) -> bool:
    """Whether a UPS is of this family, and only in a state that the profile does not list: 29 of a later firmware.

    Refused, the device would be none at all for as long as the state lasts. So its sysObjectID must name the family,
    and one of the numbers of `any_of` be believable and not 0: a maker's PDUs have the same OID, and zeros there.
    """
    named = "output_source" in profile.probe.all_of and _is_named(profile, sys_object_id)
    if profile.kind != "ups" or not named:
        return False
    tables = profile.tables(answers)
    states = [raw for source in profile.output_source for _oid, raw in source.read(answers, tables)]
    if not any(isinstance(raw, int) and 1 <= raw <= _MOST_STATES for raw in states):
        return False
    others = [name for name in profile.probe.all_of if name != "output_source"]
    numbers = [name for name in profile.probe.any_of if name in NUMBERS]
    return (
        all(_has_value(answers.get(scalar.oid)) for scalar in profile.probe.present)
        and all(_is_reported(name, profile, answers, tables) for name in others)
        and any(_is_measured(name, profile, answers, tables) for name in numbers)
    )


def _is_a_ups(profile: Profile, answers: Answers) -> bool:
    """Whether a battery or the output source is reported: no rack PDU answers either."""
    tables = profile.tables(answers)
    states = {
        source.values.get(raw)
        for source in profile.output_source
        for _oid, raw in source.read(answers, tables)
        if isinstance(raw, int)
    }
    return bool(states - {None, OutputSource.UNKNOWN}) or any(
        _is_measured(name, profile, answers, tables) for name in ("charge_pct", "runtime_s")
    )


def _is_measured(name: str, profile: Profile, answers: Answers, tables: Tables) -> bool:
    places = [(source, oid) for source in profile.numbers.get(name, ()) for oid in source.places(tables)]
    return any(source.convert(answers.get(oid, Missing.NO_ANSWER))[0] for source, oid in places)


def unmet(profile: Profile, answers: Answers) -> list[str]:
    """Say what of the profile's `probe` the answers lack; empty if it fits."""
    tables = profile.tables(answers)
    missing = [
        f"{scalar.object} is not answered"
        for scalar in profile.probe.present
        if not _has_value(answers.get(scalar.oid))
    ]
    missing += [
        f"{_objects(profile, name)} do not report {name}"
        for name in profile.probe.all_of
        if not _is_reported(name, profile, answers, tables)
    ]
    any_of = profile.probe.any_of
    if any_of and not any(_is_reported(name, profile, answers, tables) for name in any_of):
        missing.append(f"none of {', '.join(any_of)} is reported")
    return missing


def _objects(profile: Profile, name: str) -> str:
    return " or ".join(dict.fromkeys(source.object for source in profile.sources_of(name)))


def _has_value(raw: Answer | None) -> bool:
    return raw is not None and not isinstance(raw, Missing)


def _is_reported(name: str, profile: Profile, answers: Answers, tables: Tables) -> bool:
    if name == "output_source":
        return any(_means_something(source, answers, tables) for source in profile.output_source)
    if name == "battery_status":
        return any(_means_something(source, answers, tables) for source in profile.battery_status)
    if name == "outlets":
        return any(
            answers[oid] in table.values
            for table in profile.outlets
            for oid in tables.get(table.column, ())
            if isinstance(answers[oid], int)
        )
    for source in profile.numbers.get(name, ()):
        for oid in source.places(tables):
            raw = answers.get(oid, Missing.NO_ANSWER)
            if _has_value(raw) and (profile.kind == "ups" or source.convert(raw)[0] is not None):
                return True
    return False


def _means_something(source: OutputSourceSource | BatteryStatusSource, answers: Answers, tables: Tables) -> bool:
    for _oid, raw in source.read(answers, tables):
        if isinstance(raw, Missing):
            continue
        try:
            source.word(raw)
        except KeyError:
            continue
        return True
    return False


def hinted(profile: Profile, sys_object_id: str, sys_descr: str) -> bool:
    """Whether the card says that it is of this family. Of use only to choose between two that fit equally well."""
    return _is_named(profile, sys_object_id) or any(
        text.casefold() in sys_descr.casefold() for text in profile.match.sys_descr
    )


def _is_named(profile: Profile, sys_object_id: str) -> bool:
    return any(sys_object_id == oid or below(sys_object_id, oid) for oid in profile.match.sys_object_ids)


def choose(profiles: Sequence[Profile], answers: Answers, *, sys_object_id: str, sys_descr: str) -> tuple[Profile, ...]:
    """Return every family that fits, the most trusted first: rank, then what the card says it is.

    All of one kind: a UPS whose card has outlets as well is a UPS. One that is in a state which its family does not
    list is one as well, unless a PDU fits: what it says is then decoded as `unknown`, and rejected by name.
    """
    fitting = [profile for profile in profiles if fits(profile, answers)]
    if not fitting or any(profile.kind == "ups" for profile in fitting):
        fitting = [
            profile
            for profile in profiles
            if profile in fitting or fits_but_for_its_state(profile, answers, sys_object_id)
        ]
    kind = "ups" if any(profile.kind == "ups" for profile in fitting) else "pdu"
    if kind == "pdu" and any(_is_a_ups(profile, answers) for profile in profiles if profile.kind == "ups"):
        return ()  # A UPS of which only a part is answered: its outlets do not make a rack PDU of it.
    fitting = [profile for profile in fitting if profile.kind == kind]
    return tuple(
        sorted(
            fitting, key=lambda profile: (-profile.rank, not hinted(profile, sys_object_id, sys_descr), profile.name)
        )
    )


def partly(profiles: Sequence[Profile], answers: Answers, *, sys_object_id: str, sys_descr: str) -> tuple[Profile, ...]:
    """Return the families of which at least one field is in the answers, where none fits as a whole.

    For a truncated walk; a daemon must not act on it.
    """
    found = []
    for profile in profiles:
        tables = profile.tables(answers)
        if any(
            _is_reported(name, profile, answers, tables)
            for name in ("output_source", "battery_status", "outlets", *profile.numbers)
        ):
            found.append(profile)
    kind = "ups" if any(profile.kind == "ups" for profile in found) else "pdu"
    return tuple(
        sorted(
            (profile for profile in found if profile.kind == kind),
            key=lambda profile: (not hinted(profile, sys_object_id, sys_descr), -profile.rank, profile.name),
        )
    )


def identity(answers: Answers) -> tuple[str, str]:
    """Return what a device calls itself: sysObjectID and sysDescr (RFC 3418), "" where it does not."""
    object_id, descr = answers.get("1.3.6.1.2.1.1.2.0"), answers.get("1.3.6.1.2.1.1.1.0")
    text = descr.decode("utf-8", "replace") if isinstance(descr, bytes) else ""
    shown = "".join(letter for letter in text if letter.isprintable())[:_LONGEST_DESCR]
    return str(object_id) if isinstance(object_id, Oid) else "", shown
