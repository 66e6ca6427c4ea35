"""SNMP behind one small port: get, walk, set. With `snmp_engine` the one place that touches pysnmp.

What pysnmp does not do by itself, and what is done here (measured with 7.1.30):

- An engine's first request loads its MIB modules from disk: 0.4 s that stop the loop, 5 s on a starved host. Engines
  are built, and asked a first question, in a thread; there is one for each event loop.
- Answers with fewer, other or swapped varbinds are accepted silently: values are keyed by OID, the rest is missing.
- An answer with an error status still carries varbinds that look good: the status is looked at first, always.
- SNMPv1 refuses a whole request for one missing object, and pysnmp then shows every object as missing: the one that
  the error index names is taken out and the rest is asked again.
- A packet that is no SNMP at all raises in the loop's callback, a traceback for each: counted here, and dropped.
- Its timeouts are taken from wall time, so that a step of the clock stretches or cuts them: given the loop's clock.
- An exception in its timer ends all timing out for ever: such an engine is replaced.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from pysnmp.carrier.asyncio.dgram import udp, udp6
from pysnmp.entity import config
from pysnmp.entity.rfc3413 import cmdgen
from pysnmp.proto import errind, rfc1902, rfc1905

from powerguard.options import SecretError
from powerguard.profiles.values import Answer, Missing, Oid, below, parts
from powerguard.sources.base import why_not_found
from powerguard.sources.snmp_engine import (
    Engine,
    Udp,
    Udp6,
    add_transport,
    answer_to,
    engine_for,
    leave_engine,
)
from powerguard.sources.snmp_options import SnmpOptions

MAX_BATCH: Final = 15
"""Objects in one request: old cards answer tooBig, or nothing at all, to more."""
MAX_ROWS: Final = 256
"""Rows of one walk: a card that lies about its table must not keep us for ever."""
_MOST_REFUSALS: Final = 3
_GRACE_S: Final = 0.5
_RESOLVE_S: Final = 2.0
_serial = itertools.count(1)
_SECRET_LENGTH: Final = 8
_TOO_BIG, _NO_SUCH_NAME = 1, 2
# RFC 3416 section 3, in order from 0.
_ERROR_STATUS: Final = (
    *("noError", "tooBig", "noSuchName", "badValue", "readOnly", "genErr", "noAccess", "wrongType", "wrongLength"),
    *("wrongEncoding", "wrongValue", "noCreation", "inconsistentValue", "resourceUnavailable", "commitFailed"),
    *("undoFailed", "authorizationError", "notWritable", "inconsistentName"),
)


class SnmpError(Exception):
    """A request that brought nothing, in one line for the operator. unanswered: nobody answered at all."""

    def __init__(self, reason: str, *, unanswered: bool = False) -> None:
        """Keep the reason as the text of the exception."""
        super().__init__(reason)
        self.unanswered = unanswered


@dataclass(frozen=True, slots=True)
class Typed:
    """A value to SET, with the type that the object has."""

    kind: Literal["integer", "gauge", "timeticks", "octets", "oid"]
    value: int | bytes | str


class SnmpPort(Protocol):
    """What a source needs of SNMP. Everything raises SnmpError, and nothing else but CancelledError."""

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID asked for, `Missing` where there is no value."""
        ...

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return the objects that come next after these, each once, by their own OIDs."""
        ...

    async def walk(self, root: str) -> dict[str, Answer]:
        """Return everything under root, at most MAX_ROWS objects."""
        ...

    async def set(self, values: Mapping[str, Typed]) -> None:
        """Set objects in one request, all or none."""
        ...

    async def close(self) -> None:
        """Forget the target. The port cannot be used any more."""
        ...


_AUTH: Final = {
    "MD5": config.USM_AUTH_HMAC96_MD5,
    "SHA": config.USM_AUTH_HMAC96_SHA,
    "SHA-224": config.USM_AUTH_HMAC128_SHA224,
    "SHA-256": config.USM_AUTH_HMAC192_SHA256,
    "SHA-384": config.USM_AUTH_HMAC256_SHA384,
    "SHA-512": config.USM_AUTH_HMAC384_SHA512,
}
_PRIV: Final = {
    "DES": config.USM_PRIV_CBC56_DES,
    "AES": config.USM_PRIV_CFB128_AES,
    "AES-192": config.USM_PRIV_CFB192_AES,
    "AES-256": config.USM_PRIV_CFB256_AES,
}
_TYPES: Final = {
    "integer": rfc1902.Integer32,
    "gauge": rfc1902.Gauge32,
    "timeticks": rfc1902.TimeTicks,
    "octets": rfc1902.OctetString,
    "oid": rfc1902.ObjectName,
}


class PysnmpPort:
    """SNMP v1, v2c and v3 to one card. `retries`: how often a request is repeated before it counts as unanswered."""

    def __init__(self, options: SnmpOptions, *, retries: int = 1) -> None:
        """Connect to nothing yet: the first request builds the engine and resolves the name."""
        self._options = options
        self._retries = retries
        self._name = f"pg{next(_serial)}"
        self._engine: Engine | None = None
        self._address: tuple[Any, ...] | None = None
        self._resolve_again = False
        self._names: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    @property
    def where(self) -> str:
        """Return the card as the operator knows it."""
        return f"{self._options.host}:{self._options.port}"

    # --- The target ---------------------------------------------------------------------------------------------

    async def _ready(self) -> Any:  # noqa: ANN401
        async with self._lock:  # A poll and a doctor's probe may come first together.
            if self._engine is not None and self._engine.broken:
                await self.close()
            if self._engine is None:
                self._engine = await self._configure()
            if self._address is None or self._resolve_again:
                await self._point(self._engine.engine)
        return self._engine.engine

    async def _configure(self) -> Engine:
        options, name = self._options, self._name
        try:
            community = b"public" if options.community is None else options.community.read()
            auth = None if options.auth is None else options.auth.read()
            priv = None if options.priv is None else options.priv.read()
        except SecretError as error:
            raise SnmpError(str(error)) from error
        for word, secret in (("auth", auth), ("priv", priv)):
            if secret is not None and len(secret) < _SECRET_LENGTH:
                msg = f"{self.where}: the {word} passphrase is shorter than {_SECRET_LENGTH} characters (RFC 3414 11.2)"
                raise SnmpError(msg)
        if options.user is None:
            known = await engine_for(name, None, ())
            config.add_v1_system(known.engine, name, community)
            model, level, security_name = (0 if options.version == 1 else 1), "noAuthNoPriv", name
        else:
            keys = (auth, options.auth_protocol, priv, options.priv_protocol)
            known = await engine_for(name, options.user, tuple(map(hash, keys)))
            auth_protocol = config.USM_AUTH_NONE if auth is None else _AUTH[options.auth_protocol]
            priv_protocol = config.USM_PRIV_NONE if priv is None else _PRIV[options.priv_protocol]
            # A passphrase becomes a key by hashing a megabyte of it: off the loop.
            await asyncio.to_thread(
                config.add_v3_user, known.engine, options.user, auth_protocol, auth, priv_protocol, priv
            )
            level = "noAuthNoPriv" if auth is None else "authNoPriv" if priv is None else "authPriv"
            model, security_name = 3, options.user
        config.add_target_parameters(known.engine, name, security_name, level, model)
        return known

    async def _point(self, engine: Any) -> None:  # noqa: ANN401
        """Look the address up, anew after a failure; while the name service is down the old address serves."""
        try:
            address = await self._resolve()
        except (OSError, TimeoutError, UnicodeError) as error:
            if self._address is not None:
                return
            because = why_not_found(error)
            msg = f"cannot look up {self._options.host}: {because} (an address in the settings needs no name service)"
            raise SnmpError(msg) from error
        self._resolve_again = False
        if address == self._address:
            return
        if "%" in address[0] or any(address[3:]):  # pysnmp drops the zone
            msg = f"{self.where}: {address[0]} is good on one link only: name an address of the card without a zone"
            raise SnmpError(msg)
        domain, transport = (udp6.DOMAIN_NAME, Udp6) if len(address) == 4 else (udp.DOMAIN_NAME, Udp)
        if config.get_transport(engine, domain) is None:
            add_transport(engine, domain, transport())
        if self._address is not None:
            config.delete_target_address(engine, self._name)
        hundredths = round(self._options.timeout_s * 100)
        config.add_target_address(engine, self._name, domain, address[:2], self._name, hundredths, self._retries)
        self._address = address

    async def _resolve(self) -> tuple[Any, ...]:
        host, port = self._options.host, self._options.port
        with contextlib.suppress(ValueError):
            return (host, port) if ipaddress.ip_address(host).version == 4 else (host, port, 0, 0)
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        # A name with both: many cards have an IPv6 address and no SNMP on it.
        return tuple(min(found, key=lambda one: one[0] is not socket.AF_INET)[4])

    async def close(self) -> None:
        """Forget the target."""
        if self._engine is None:
            leave_engine(self._name)
            return
        engine = self._engine.engine
        if self._address is not None:
            config.delete_target_address(engine, self._name)
        config.delete_target_parameters(engine, self._name)
        if self._options.user is None:
            config.delete_v1_system(engine, self._name)
        self._engine = self._address = None
        leave_engine(self._name)

    # --- Requests -----------------------------------------------------------------------------------------------

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID, `Missing` where there is no value."""
        answers: dict[str, Answer] = {}
        for start in range(0, len(oids), MAX_BATCH):
            answers.update(await self._get(list(oids[start : start + MAX_BATCH])))
        return answers

    async def _get(self, oids: list[str]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        refusals = 0
        while oids:
            status, index, found = await self._request(cmdgen.GetCommandGenerator(), self._nulls(oids))
            if status == 0:
                return answers | {oid: found.get(oid, Missing.NO_ANSWER) for oid in oids}
            if status == _TOO_BIG and len(oids) > 1:
                half = len(oids) // 2
                return answers | await self._get(oids[:half]) | await self._get(oids[half:])
            if not 1 <= index <= len(oids):
                raise self._refused(status, "that names no object")
            named = oids.pop(index - 1)
            if status == _NO_SUCH_NAME:
                answers[named] = Missing.NO_SUCH_OBJECT
                continue
            answers[named] = Missing.REFUSED
            refusals += 1
            if refusals >= _MOST_REFUSALS or not oids:
                raise self._refused(status, f"for {named}")
        return answers

    async def following(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return what comes next after each OID, by GETNEXT: the one question that version 1 does not refuse.

        Which answer belongs to which question is not told, for cards leave answers out. Beyond the last object of the
        card comes nothing.
        """
        answers: dict[str, Answer] = {}
        for start in range(0, len(oids), MAX_BATCH):
            answers.update(await self._following(list(oids[start : start + MAX_BATCH])))
        return answers

    async def _following(self, oids: list[str]) -> dict[str, Answer]:
        while oids:
            status, index, found = await self._request(cmdgen.NextCommandGenerator(), self._nulls(oids))
            if status == 0:
                return {oid: answer for oid, answer in found.items() if answer is not Missing.END_OF_MIB}
            if status == _TOO_BIG and len(oids) > 1:
                half = len(oids) // 2
                return await self._following(oids[:half]) | await self._following(oids[half:])
            if status != _NO_SUCH_NAME or not 1 <= index <= len(oids):
                raise self._refused(status, "to what comes next")
            end = parts(oids[index - 1])  # What lies behind this one lies beyond the end as well.
            oids = [oid for oid in oids if parts(oid) < end]
        return {}

    async def walk(self, root: str, after: str | None = None) -> dict[str, Answer]:
        """Return what lies under root, by GETNEXT: version 1 knows nothing better. after: begin behind this object."""
        answers: dict[str, Answer] = {}
        at = root if after is None else after
        while len(answers) < MAX_ROWS:
            status, _index, found = await self._request(cmdgen.NextCommandGenerator(), self._nulls([at]))
            if status not in (0, _NO_SUCH_NAME):
                raise self._refused(status, f"after {at}")
            if status or not found:
                break
            oid, answer = next(iter(found.items()))
            # A card that goes backwards would send us round for ever.
            if answer is Missing.END_OF_MIB or not below(oid, root) or parts(oid) <= parts(at):
                break
            answers[oid] = answer
            at = oid
        return answers

    async def set(self, values: Mapping[str, Typed]) -> None:
        """Set objects in one request, all or none (RFC 3416 4.2.5)."""
        names = list(values)
        varbinds = [(self._name_of(oid), _typed(values[oid])) for oid in names]
        status, index, _found = await self._request(cmdgen.SetCommandGenerator(), varbinds)
        if status:
            named = names[index - 1] if 1 <= index <= len(names) else "no object"
            raise self._refused(status, f"for {named}")

    def _name_of(self, oid: str) -> Any:  # noqa: ANN401
        if oid not in self._names:
            self._names[oid] = rfc1902.ObjectName(parts(oid))
        return self._names[oid]

    def _nulls(self, oids: Iterable[str]) -> list[tuple[Any, Any]]:
        return [(self._name_of(oid), rfc1905.unSpecified) for oid in oids]

    async def _request(self, generator: Any, varbinds: list[tuple[Any, Any]]) -> tuple[int, int, dict[str, Answer]]:  # noqa: ANN401
        """Return error status, error index and what was answered, by OID."""
        engine = await self._ready()
        asked = asyncio.get_running_loop().create_future()
        tries_s = self._options.timeout_s * (self._retries + 1)
        try:
            async with asyncio.timeout(tries_s + _GRACE_S):
                generator.send_varbinds(engine, self._name, None, b"", varbinds, answer_to(asked))
                indication, status, index, found = await asked
            if indication is None:
                return int(status), int(index), {str(name): _plain(value) for name, value in found}
        except TimeoutError:
            indication = errind.requestTimedOut
        except Exception as error:  # pysnmp raises PySnmpError, pyasn1 errors, and what its parsers trip over.
            msg = f"{self.where}: the request failed in pysnmp: {type(error).__name__}"
            raise SnmpError(msg) from error
        raise self._failure(indication, tries_s)

    def _refused(self, status: int, what: str) -> SnmpError:
        name = _ERROR_STATUS[status] if status < len(_ERROR_STATUS) else f"error {status}"
        return SnmpError(f"{self.where}: {name} {what}")

    def _failure(self, indication: Any, tries_s: float) -> SnmpError:  # noqa: ANN401
        version = self._options.version
        if isinstance(indication, errind.RequestTimedOut):
            self._resolve_again = True
            check = "address, user, priv passphrase" if version == 3 else "address, community"
            msg = f"no answer from {self.where} in {tries_s:.1f} s (v{version}): check {check}, ACL of the card"
            return SnmpError(msg, unanswered=True)
        hints = {
            errind.WrongDigest: "the auth passphrase or auth_protocol is not the card's",
            errind.UnknownUserName: f"the card knows no user {self._options.user!r}",
            errind.UnsupportedSecurityLevel: "the user has another security level on the card: set auth and priv alike",
            errind.DecryptionError: "the priv passphrase or priv_protocol is not the card's",
            errind.NotInTimeWindow: "the card's SNMPv3 clock jumps",
        }
        hint = next((text for kind, text in hints.items() if isinstance(indication, kind)), str(indication))
        return SnmpError(f"{self.where} refuses (v{version}): {hint}")


def _typed(value: Typed) -> Any:  # noqa: ANN401
    return _TYPES[value.kind](value.value)


def _plain(value: Any) -> Answer:  # noqa: ANN401
    """Return a pysnmp value as plain Python. The three exceptions of version 2 are NULLs to pysnmp: they come first."""
    if isinstance(value, rfc1905.NoSuchObject):
        return Missing.NO_SUCH_OBJECT
    if isinstance(value, rfc1905.NoSuchInstance):
        return Missing.NO_SUCH_INSTANCE
    if isinstance(value, rfc1905.EndOfMibView):
        return Missing.END_OF_MIB
    if isinstance(value, rfc1902.univ.Null):  # Before the strings: to pyasn1 a NULL is one.
        return Missing.NULL
    if isinstance(value, rfc1902.univ.Integer):
        return int(value)
    if isinstance(value, rfc1902.univ.ObjectIdentifier):
        return Oid(str(value))
    return bytes(value)
