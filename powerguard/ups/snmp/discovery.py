"""What a card is: which of its objects are polled, and which of its commands is the one that is wanted.

Reads are repeated like a poll's; a SET is sent once. For an order that switches, a second one may begin the countdown
again: an order that is not answered is read back instead.
"""

import asyncio
import difflib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from powerguard.options import Secret
from powerguard.ups.profiles.commands import Switch, offered
from powerguard.ups.profiles.load import Profiles, load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.schema import Profile, SetType, Verb
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, below, parts
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import MAX_ROWS, CardPort, SnmpError, SnmpPort, Typed

SYS_DESCR = Oid("1.3.6.1.2.1.1.1.0")
SYS_OBJECT_ID = Oid("1.3.6.1.2.1.1.2.0")
SYS_UP_TIME = Oid("1.3.6.1.2.1.1.3.0")
FALLBACK = "rfc1628"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a card says of itself; "" where it does not."""

    sys_descr: str = ""
    sys_object_id: str = ""


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
    with_pdus: rack PDUs are welcome as well; they report neither utility nor battery.
    """
    candidates = _candidates(where, profiles, wanted)
    if with_pdus and wanted is None:
        candidates = profiles.every()
    elif not with_pdus and any(profile.kind == "pdu" for profile in candidates[:1]):
        msg = f"{where}: profile {wanted} is for rack PDUs, which do not report whether utility is there: name a UPS's"
        raise SnmpError(msg)
    identity = _identity(await port.get([SYS_DESCR, SYS_OBJECT_ID]))
    answers = await _look_for_families(port, candidates)
    chosen = choose(candidates, answers, sys_object_id=identity.sys_object_id, sys_descr=identity.sys_descr)
    if not chosen:
        answers = await _ask_families(port, candidates)
        chosen = choose(candidates, answers, sys_object_id=identity.sys_object_id, sys_descr=identity.sys_descr)
    if not chosen or (wanted is not None and chosen[0].name != wanted):
        refused = [oid for oid, answer in answers.items() if answer is Missing.REFUSED]
        raise SnmpError(_nothing_fits(where, identity, candidates, wanted, refused))
    answers = await _each_that_it_has(port, _scalars_of(chosen))
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
        present = [one for one in candidates if _is_there(one, answers)]
        answers.update(await port.following(_right_before(oid for one in present for oid in one.mandatory())))
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
    objects = profile.first_asked()
    places = _right_before(objects)
    return any(oid in objects or any(below(oid, place) for place in places) for oid in answers)


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
    return await port.get(_scalars_of(profiles))


def _scalars_of(profiles: tuple[Profile, ...]) -> list[str]:
    return list(dict.fromkeys([SYS_UP_TIME, *(oid for one in profiles for oid in one.scalars())]))


async def _each_that_it_has(port: SnmpPort, oids: Sequence[str]) -> dict[str, Answer]:
    """Ask for objects of which a card may lack many: some refuse what they lack with a general error."""
    answers: dict[str, Answer] = {}
    try:
        return await port.get(oids)
    except SnmpError as error:
        if error.unanswered:
            raise
    for oid in oids:
        try:
            answers.update(await port.get([oid]))
        except SnmpError as error:
            if error.unanswered:
                raise
            answers[oid] = Missing.REFUSED
    return answers


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

    return Identity(sys_descr=text(SYS_DESCR), sys_object_id=text(SYS_OBJECT_ID))


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


# --- Orders ---------------------------------------------------------------------------------------------------------


class SnmpControl:
    """A card while it is given an order (`opened`). Everything raises SnmpError."""

    def __init__(self, options: SnmpOptions, reads: CardPort, writes: CardPort) -> None:
        """Use what `opened` made."""
        self.where = f"{options.host}:{options.port}"
        self._profile = options.profile
        self._reads, self._writes = reads, writes

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID, `Missing` where there is no value."""
        return await self._reads.get(oids)

    async def set(self, oid: str, kind: SetType, raw: int | str) -> None:
        """Set one object, once. SnmpError with `unanswered`: it may have been carried out."""
        await self._writes.set({oid: Typed(kind, raw.encode() if kind == "octets" and isinstance(raw, str) else raw)})

    async def find(self, verb: Verb, outlet: str) -> Switch:
        """Return the command as this card has it: of several families' one that promises the way back comes first.

        Asks for what the families with this command cannot do without, and for nothing else: two requests.
        """
        families = await asyncio.to_thread(_families, self._profile, verb)
        if not families:
            msg = f"{self.where}: no family has a command {verb.value}" + (
                f" that its profile {self._profile} or RFC 1628 would know" if self._profile else ""
            )
            raise SnmpError(msg)
        wanted = [SYS_DESCR, SYS_OBJECT_ID, *(oid for one in families for oid in one.mandatory())]
        answers = await _each_that_it_has(self._reads, list(dict.fromkeys(wanted)))
        device = {name: answers.get(name) for name in (SYS_DESCR, SYS_OBJECT_ID)}
        described = device[SYS_DESCR]
        named = device[SYS_OBJECT_ID]
        spoken = choose(
            families,
            answers,
            sys_object_id=named if isinstance(named, Oid) else "",
            sys_descr=described.decode("utf-8", "replace") if isinstance(described, bytes) else "",
        )
        without: list[str] = []
        for switch in sorted(offered(spoken, verb, outlet), key=lambda each: each.returns != "cycles"):
            values = await self.get(switch.reads())
            lacking = switch.lacks(values)
            if not lacking:
                return switch
            without.append(f"{switch.name} lacks {', '.join(lacking)}")
        tried = ", ".join(one.name for one in families)
        because = "; ".join(without) or f"it speaks none of the families that have it ({tried})"
        msg = f"{self.where} does not offer {verb.value}: {because}"
        raise SnmpError(msg, unanswered=all(answer is Missing.NO_ANSWER for answer in answers.values()))


@asynccontextmanager
async def opened(options: SnmpOptions, community: Secret | None = None) -> AsyncIterator[SnmpControl]:
    """Open a card for orders and close it again. community: for writing, where it differs from the one for reading."""
    reads = CardPort(options)
    writing = options if community is None else options.model_copy(update={"community": community})
    writes = CardPort(writing, retries=0)
    try:
        yield SnmpControl(options, reads, writes)
    finally:
        await reads.close()
        await writes.close()


def _families(named: str | None, verb: Verb) -> tuple[Profile, ...]:
    profiles = load_profiles()
    families = profiles.ranked()
    if named is not None:
        families = tuple(one for one in families if one.name in {named, "rfc1628"})
    return tuple(one for one in families if verb in one.controls)
