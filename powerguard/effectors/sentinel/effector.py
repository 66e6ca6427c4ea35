"""Layer C from the host's side: tells sentinels at the commit that they may power this host on, and takes it back."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from powerguard.clock import Clock, boot_id, boottime_s
from powerguard.core.actions import Action, ArmWay, CheckWay, Detail, DisarmWay
from powerguard.effectors.base import EffectorError
from powerguard.effectors.sentinel.client import Answer, Peer, session
from powerguard.effectors.sentinel.options import SentinelOptions
from powerguard.effectors.tls import Verify, verifying
from powerguard.options import SecretError
from powerguard.protocols.sentinel import MAX_IN_S, MIN_KEY_BYTES

_ANSWER_MARGIN_S: Final = 0.1
"""We end this much before the action's own deadline, so that what was seen is told and not only that time is up."""

_MOST_ORDERS: Final = 99
"""More is no number of orders that anybody gives."""

_Told = dict[str, Answer | str]
"""By URL: what the sentinel answered, or why there is no answer."""


class SentinelEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` of `Way.SENTINEL`. All sentinels are asked at the same time.

    feeds: names of the UPSes that feed this host; the sentinel must call them the same. armed: False in dry-run:
    sentinels are looked at, nothing is stored.
    """

    def __init__(
        self,
        options: SentinelOptions,
        *,
        feeds: Sequence[str],
        armed: bool = True,
        clock: Clock = boottime_s,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._options = options
        self._feeds = tuple(sorted(set(feeds)))
        self._armed = armed
        self._clock = clock
        self._boot = boot
        self._verify: Verify | None = None

    async def carry_out(self, action: Action) -> Detail:
        """Check: one that would power this host on; arm: one that has stored it; disarm: all that were reached.

        Returns sentinels (which), failed (what the others say, where there are any); of ArmWay in_s as the sentinel
        holds it; of DisarmWay disarmed (bool: one held an intent), and where this host was ordered powered on orders,
        ordered_by and because. Raises EffectorError where none will do it; of DisarmWay where one of them could not be
        told.
        """
        match action:
            case CheckWay():
                told = await self._ask("hello", {"feeds": self._feeds}, action)
                return self._able(told)
            case ArmWay() | DisarmWay() if not self._armed:
                return (("dry_run", True),)
            case ArmWay(outage=outage, in_s=in_s):
                asked = {
                    "feeds": self._feeds,
                    "outage": outage,
                    "boot_id": self._boot(),
                    "in_s": min(max(in_s, 0.0), MAX_IN_S),
                    "valid_s": self._options.valid_for_h * 3600.0,
                }
                return self._stored(await self._ask("store", asked, action), outage)
            case DisarmWay(outage=""):
                # One that is dead takes all the time that it is given: half of it is for the others' second answer.
                soon = replace(action, by_s=(self._clock() + action.by_s) / 2)
                told = await self._ask("hello", {"feeds": self._feeds}, soon)
                for outage in _held(told):
                    told = await self._ask("withdraw", {"outage": outage}, action)
                return self._withdrawn(told)
            case DisarmWay(outage=outage):
                return self._withdrawn(await self._ask("withdraw", {"outage": outage}, action))
            case _:
                msg = f"the sentinel effector carries out CheckWay, ArmWay and DisarmWay, not {type(action).__name__}"
                raise TypeError(msg)

    def _able(self, told: _Told) -> Detail:
        able, failed = [], []
        for url, answer in told.items():
            blocked = [answer] if isinstance(answer, str) else _texts(answer.get("blocked"))
            if blocked:
                failed.append(f"{url}: {', '.join(blocked)}")
            else:
                able.append(url)
        if not able:
            raise EffectorError("no sentinel would power this host on: " + "; ".join(failed))
        return _detail(able, failed)

    def _stored(self, told: _Told, outage: str) -> Detail:
        stored, failed, in_s = [], [], 0.0
        for url, answer in told.items():
            if isinstance(answer, str):
                failed.append(f"{url}: {answer}")
                continue
            held_s = answer.get("in_s")
            if answer.get("outage") != outage or isinstance(held_s, bool) or not isinstance(held_s, int | float):
                failed.append(f"{url}: says that it has stored something else")
                continue
            if answer.get("mode") != "armed":
                failed.append(f"{url}: has stored it, but runs in dry-run (mode: armed powers hosts on)")
                continue
            stored.append(url)
            in_s = max(in_s, float(held_s))
        if not stored:
            raise EffectorError("no sentinel has stored it: " + "; ".join(failed))
        return (("in_s", in_s), *_detail(stored, failed))

    def _withdrawn(self, told: _Told) -> Detail:
        failed = [f"{url}: {answer}" for url, answer in told.items() if isinstance(answer, str)]
        if failed:
            raise EffectorError("not withdrawn everywhere: " + "; ".join(failed))
        orders = {url: _orders(answer) for url, answer in told.items()}
        ordered = [url for url, count in orders.items() if count]
        more: Detail = ()
        if ordered:
            count, who = sum(orders.values()), ", ".join(ordered)
            because = f"{who} has powered this host on" + (f", at order {count}" if count > 1 else "")
            more = (("orders", count), ("ordered_by", who), ("because", because))
        found = any(answer.get("was_there") is True for answer in told.values() if not isinstance(answer, str))
        return (*_detail(list(told), []), ("disarmed", found), *more)

    async def _ask(self, kind: str, asked: Mapping[str, Any], action: Action) -> _Told:
        """Ask all at once. Raises EffectorError where nobody could be asked."""
        limit_s = max(action.by_s - self._clock() - _ANSWER_MARGIN_S, 0.0)
        by_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(by_s):
                key = await self._key()
                verify = await self._verifying()
        except TimeoutError:
            msg = f"sentinel.key and sentinel.ca were not read within {limit_s:.1f} s: their disk hangs"
            raise EffectorError(msg) from None
        host = self._options.name or socket.gethostname().partition(".")[0]
        told: _Told = dict.fromkeys(self._options.urls, "")
        async with session(verify) as open_session, asyncio.TaskGroup() as tasks:

            async def ask(url: str) -> None:
                peer = Peer(url, open_session, key)
                try:
                    async with asyncio.timeout_at(by_s):
                        told[url] = await peer.ask(kind, {"host": host, **asked})
                except TimeoutError:
                    told[url] = peer.seen
                except EffectorError as error:
                    told[url] = str(error)

            for url in self._options.urls:
                tasks.create_task(ask(url))
        return told

    async def _key(self) -> bytes:
        if self._options.key is None:
            msg = "sentinel.kind is none: no other host powers this one on"
            raise EffectorError(msg)
        try:
            key = await asyncio.to_thread(self._options.key.read)
        except SecretError as error:
            msg = f"sentinel.key: {error}"
            raise EffectorError(msg) from None
        if len(key) < MIN_KEY_BYTES:
            msg = f"sentinel.key: {len(key)} bytes are too few, {MIN_KEY_BYTES} are needed (openssl rand -hex 32)"
            raise EffectorError(msg)
        return key

    async def _verifying(self) -> Verify:
        """What proves that it is our sentinel. Raises EffectorError."""
        if self._verify is None:
            self._verify = await verifying("sentinel", self._options.fingerprint, self._options.ca)
        return self._verify


def _orders(told: Answer | str) -> int:
    """How often it has ordered this host powered on in this outage; an older sentinel does not say."""
    count = 0 if isinstance(told, str) else told.get("orders")
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_ORDERS else 0


def _held(told: _Told) -> list[str]:
    """Return the outages of the intents that stand, for a host that knows of none any more."""
    intents = [answer.get("intent") for answer in told.values() if not isinstance(answer, str)]
    return sorted({str(intent.get("outage")) for intent in intents if isinstance(intent, Mapping)})


def _texts(told: object) -> list[str]:
    """What blocks it; an answer that does not say is none that promises anything."""
    if not isinstance(told, list):
        return ["does not say whether it would"]
    return ["".join(c if c.isprintable() else " " for c in str(each)[:300]) for each in told[:8]]


def _detail(urls: list[str], failed: list[str]) -> Detail:
    more: Detail = (("failed", "; ".join(failed)),) if failed else ()
    return (("sentinels", ", ".join(urls)), *more)
