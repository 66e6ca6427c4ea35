"""One network card that is told something: reads are repeated like a poll's, a SET is sent once.

A poll is sent again when it is not answered. For a SET that switches that would be the order twice, and the second
one may begin the countdown anew: what is not answered here is read back instead.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from powerguard.options import Secret
from powerguard.ups.profiles.commands import Switch, offered
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.schema import Profile, SetType, Verb
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.snmp.discovery import SYS_DESCR, SYS_OBJECT_ID
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import CardPort, SnmpError, Typed


class SnmpControl:
    """A card while somebody tells it something (`opened`). Everything raises SnmpError."""

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
        answers = await self.get(list(dict.fromkeys(wanted)))
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
            told = await self.get(switch.reads())
            lacking = switch.lacks(told)
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
