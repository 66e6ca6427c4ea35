"""Which families a device speaks: found by asking it, since what cards say of themselves is often wrong.

Seen on real cards: the sysObjectID of net-snmp on Linux, of the UPS-MIB itself, of the maker's PDUs, of another maker.
"""

from collections.abc import Sequence

from powerguard.profiles.decode import Answers
from powerguard.profiles.schema import Profile
from powerguard.profiles.values import Missing, below


def fits(profile: Profile, answers: Answers) -> bool:
    """Whether the answers to `profile.mandatory()` are of this family.

    The output source must be a listed value. Of the numbers it is enough that the object exists: an empty battery
    must not make a family unknown.
    """

    def told(name: str) -> bool:
        if name == "output_source":
            return any(
                answers.get(profile.absolute(source.oid)) in source.values
                for source in profile.output_source
                if isinstance(answers.get(profile.absolute(source.oid)), int)
            )
        places = [source.oid for source in profile.numbers[name] if source.oid is not None]
        return any(not isinstance(answers.get(profile.absolute(place), Missing.NO_ANSWER), Missing) for place in places)

    any_of = profile.probe.any_of
    return all(told(name) for name in profile.probe.all_of) and (not any_of or any(told(name) for name in any_of))


def hinted(profile: Profile, sys_object_id: str, sys_descr: str) -> bool:
    """Whether the card says that it is of this family. Of use only to choose between two that fit equally well."""
    ids = [profile.absolute(oid) for oid in profile.match.sys_object_ids]
    if any(sys_object_id == oid or below(sys_object_id, oid) for oid in ids):
        return True
    return any(text.casefold() in sys_descr.casefold() for text in profile.match.sys_descr)


def choose(profiles: Sequence[Profile], answers: Answers, *, sys_object_id: str, sys_descr: str) -> tuple[Profile, ...]:
    """Return every family that fits, the most trusted first: rank, then what the card says it is."""
    fitting = [profile for profile in profiles if fits(profile, answers)]
    return tuple(
        sorted(
            fitting, key=lambda profile: (-profile.rank, not hinted(profile, sys_object_id, sys_descr), profile.name)
        )
    )
