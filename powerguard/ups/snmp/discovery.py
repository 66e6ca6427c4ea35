"""Finding out what a card is and which of its objects to poll."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from powerguard.ups.profiles.load import Profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, below, parts
from powerguard.ups.snmp.port import MAX_ROWS, SnmpError, SnmpPort

SYS_DESCR = Oid("1.3.6.1.2.1.1.1.0")
SYS_OBJECT_ID = Oid("1.3.6.1.2.1.1.2.0")
SYS_UP_TIME = Oid("1.3.6.1.2.1.1.3.0")
SYS_NAME = Oid("1.3.6.1.2.1.1.5.0")
FALLBACK = "rfc1628"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a card says of itself; "" where it does not."""

    sys_descr: str = ""
    sys_object_id: str = ""
    sys_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to ask a card at every poll. answers: what it said while we found out."""

    identity: Identity
    profiles: tuple[Profile, ...]
    oids: tuple[str, ...]
    answers: dict[str, Answer]


async def discover(
    port: SnmpPort, where: str, profiles: Profiles, wanted: str | None, *, with_pdus: bool = False
) -> Plan:
    """Return the plan for one card. Raises SnmpError when it does not answer, or fits no profile.

    where: the card as the operator knows it. wanted: a profile that the settings name; RFC 1628 still fills its gaps.
    with_pdus: rack PDUs are welcome as well; they tell nothing of utility or battery.
    """
    candidates = _candidates(where, profiles, wanted)
    if with_pdus and wanted is None:
        candidates = profiles.every()
    elif not with_pdus and any(profile.kind == "pdu" for profile in candidates[:1]):
        msg = f"{where}: profile {wanted} is for rack PDUs, which do not report whether utility is there: name a UPS's"
        raise SnmpError(msg)
    identity = _identity(await port.get([SYS_DESCR, SYS_OBJECT_ID, SYS_NAME]))
    answers = await _look_for_families(port, candidates)
    chosen = choose(candidates, answers, sys_object_id=identity.sys_object_id, sys_descr=identity.sys_descr)
    if not chosen:
        answers = await _ask_families(port, candidates)
        chosen = choose(candidates, answers, sys_object_id=identity.sys_object_id, sys_descr=identity.sys_descr)
    if not chosen or (wanted is not None and chosen[0].name != wanted):
        refused = [oid for oid, answer in answers.items() if answer is Missing.REFUSED]
        raise SnmpError(_nothing_fits(where, identity, candidates, wanted, refused))
    answers = await scalars(port, chosen)
    answers.update(await _tables(port, dict.fromkeys(column for profile in chosen for column in profile.columns())))
    return Plan(identity=identity, profiles=chosen, oids=worth_polling(answers), answers=answers)


async def _look_for_families(port: SnmpPort, candidates: tuple[Profile, ...]) -> dict[str, Answer]:
    """Look what comes next after where each family cannot do without an object; then the same for the rest of it.

    There are two dozen families: as GETs they would be 120 objects, and to version 1 each one that is not there costs a
    round trip. What comes next is answered by every version, 15 in one request, and finds the first row of a table
    whatever its index is.
    """
    answers: dict[str, Answer] = {}
    try:
        answers.update(await port.following(_right_before(oid for one in candidates for oid in one.first_asked())))
        there = [one for one in candidates if _is_there(one, answers)]
        answers.update(await port.following(_right_before(oid for one in there for oid in one.mandatory())))
    except SnmpError as error:
        if error.unanswered:
            raise
    return answers


def _right_before(oids: Iterable[str]) -> list[str]:
    """Return the places after which these objects come next; of the first rows of a table, the table itself."""
    places: dict[str, None] = {}
    for oid in oids:
        parent, _, last = oid.rpartition(".")
        places[f"{parent}.{int(last) - 1}" if int(last) > 1 else parent] = None
    return [place for place in places if place.rpartition(".")[0] not in places]


def _is_there(profile: Profile, answers: dict[str, Answer]) -> bool:
    asked = profile.first_asked()
    places = _right_before(asked)
    return any(oid in asked or any(below(oid, place) for place in places) for oid in answers)


async def _tables(port: SnmpPort, columns: Iterable[str]) -> dict[str, Answer]:
    """Walk all columns side by side: as many requests as the longest has rows, not as they have together.

    A column of which nothing came is walked by itself: cards leave answers out.
    """
    rows: dict[str, Answer] = {}
    at = {column: str(column) for column in columns}
    alone = set(at)
    try:
        for _ in range(MAX_ROWS):
            if not at:
                break
            found = await port.following(list(at.values()))
            further: dict[str, str] = {}
            for column, last in at.items():
                new = {oid: raw for oid, raw in found.items() if below(oid, column) and parts(oid) > parts(last)}
                if new:
                    rows.update(new)
                    further[column] = max(new, key=parts)
            alone -= further.keys()
            at = further
    except SnmpError as error:
        if error.unanswered:
            raise
        alone |= at.keys()
    for column in sorted(alone):
        try:
            rows.update(await port.walk(column))
        except SnmpError as error:  # A table that is refused must not cost the rest.
            if error.unanswered:
                raise
    return rows


async def _ask_families(port: SnmpPort, candidates: tuple[Profile, ...]) -> dict[str, Answer]:
    """Ask outright, of a card that does not say what comes next.

    First for what each family cannot do without, then for the rest of those that answered it.
    """
    answers = await port.get(list(dict.fromkeys(oid for profile in candidates for oid in profile.first_asked())))
    rest: dict[str, None] = {}
    for profile in candidates:
        if any(not isinstance(answers.get(oid, Missing.NO_ANSWER), Missing) for oid in profile.first_asked()):
            rest.update(dict.fromkeys(oid for oid in profile.mandatory() if oid not in answers))
    try:
        answers.update(await port.get(list(rest)))
    except SnmpError as error:  # What else a family has may be enough.
        if error.unanswered:
            raise
        answers.update(dict.fromkeys(rest, Missing.REFUSED))
    return answers


async def scalars(port: SnmpPort, profiles: tuple[Profile, ...]) -> dict[str, Answer]:
    """Ask for every scalar of the chosen profiles: objects come and go, on battery more than else."""
    return await port.get(list(dict.fromkeys([SYS_UP_TIME, *(oid for one in profiles for oid in one.scalars())])))


def worth_polling(answers: dict[str, Answer]) -> tuple[str, ...]:
    """Return what has a value, or has none just now (NULL). One object that is not there costs v1 a round trip."""
    return tuple(oid for oid, answer in answers.items() if not isinstance(answer, Missing) or answer is Missing.NULL)


def _candidates(where: str, profiles: Profiles, wanted: str | None) -> tuple[Profile, ...]:
    if wanted is None:
        return profiles.ranked()
    if wanted not in profiles.by_name:
        near = difflib.get_close_matches(wanted, profiles.by_name, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(profiles.by_name))}"
        msg = f"{where}: there is no profile {wanted!r} ({hint})"
        raise SnmpError(msg)
    return tuple(profiles.by_name[name] for name in dict.fromkeys((wanted, FALLBACK)) if name in profiles.by_name)


def _identity(answers: dict[str, Answer]) -> Identity:
    def text(oid: str) -> str:
        answer = answers.get(oid)
        if isinstance(answer, bytes):
            return "".join(char for char in answer.decode("utf-8", "replace") if char.isprintable())[:200]
        return str(answer) if isinstance(answer, Oid) else ""

    return Identity(sys_descr=text(SYS_DESCR), sys_object_id=text(SYS_OBJECT_ID), sys_name=text(SYS_NAME))


def _nothing_fits(
    where: str, identity: Identity, candidates: tuple[Profile, ...], wanted: str | None, refused: list[str]
) -> str:
    tried = ", ".join(profile.name for profile in candidates)
    what = f"does not fit profile {wanted}" if wanted else f"fits no profile (tried: {tried})"
    what += f", and refuses {', '.join(refused)}" if refused else ""
    device = f"{identity.sys_descr or 'no sysDescr'}, {identity.sys_object_id or 'no sysObjectID'}"
    return (
        f"{where} answers ({device}) and {what}:"
        " is it a UPS, may this user see its objects, or does it need a profile in /etc/powerguard/profiles.d?"
    )
