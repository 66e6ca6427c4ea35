"""Where a card is, and what is said of it when it does not answer."""

import asyncio
import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Final, Literal

from powerguard.profiles.values import Answer, DeviceError
from powerguard.sources.base import why_not_found
from powerguard.sources.snmp_options import SnmpOptions

_RESOLVE_S: Final = 2.0

Address = tuple[Any, ...]
"""As the socket module has it: (host, port), of IPv6 with two numbers more."""
Asked = tuple[int, int, dict[str, Answer]]
"""Error status, error index, and what was answered, by OID."""


class SnmpError(DeviceError):
    """A request that brought nothing, in one line for the operator."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A value to SET, with the type that the object has."""

    kind: Literal["integer", "gauge", "timeticks", "octets", "oid"]
    value: int | bytes | str


class Place:
    """The address of one card. again: it is to be looked up anew, for nobody answered there."""

    def __init__(self, options: SnmpOptions) -> None:
        """Look nothing up yet."""
        self.where = f"{options.host}:{options.port}"
        self.again = False
        self._options = options
        self._known: Address | None = None

    def silent(self, tries_s: float, check: str, late: str) -> SnmpError:
        """Return what to say of a card that did not answer for so long; its address is looked up anew.

        check: what may be wrong. late: what is said instead, where answers came later; "": none did.
        """
        self.again = True
        version = self._options.version
        because = f", but {late}" if late else f": check {check}, ACL of the card"
        msg = f"no answer from {self.where} in {tries_s:.1f} s (v{version}){because}"
        return SnmpError(msg, unanswered=True, late=bool(late))

    async def address(self) -> Address:
        """Look it up, where that is due; while the name service is down the old address serves."""
        if self._known is not None and not self.again:
            return self._known
        try:
            address = await self._resolve()
        except (OSError, TimeoutError, UnicodeError) as error:
            if self._known is not None:
                return self._known
            because = why_not_found(error)
            msg = f"cannot look up {self._options.host}: {because} (an address in the settings needs no name service)"
            raise SnmpError(msg) from error
        self.again = False
        if "%" in address[0] or any(address[3:]):  # numbers of interfaces change
            msg = f"{self.where}: {address[0]} is good on one link only: name an address of the card without a zone"
            raise SnmpError(msg)
        self._known = address
        return address

    async def _resolve(self) -> Address:
        host, port = self._options.host, self._options.port
        with contextlib.suppress(ValueError):
            return (host, port) if ipaddress.ip_address(host).version == 4 else (host, port, 0, 0)
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        # A name with both: many cards have an IPv6 address and no SNMP on it.
        return tuple(min(found, key=lambda one: one[0] is not socket.AF_INET)[4])
