"""What peers over HTTP have in common: the proof of who answers, and names that are looked up one at a time."""

import asyncio
import socket
import ssl

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from powerguard.effectors.base import EffectorError
from powerguard.ups.base import Resolver

Verify = ssl.SSLContext | aiohttp.Fingerprint


async def verifying(section: str, fingerprint: str | None, ca: str | None) -> Verify:
    """Return what proves it, by a section of the settings; certificates are read in a thread. Raises EffectorError."""
    try:
        if fingerprint is not None:
            return aiohttp.Fingerprint(bytes.fromhex(fingerprint.replace(":", "")))
        return await asyncio.to_thread(ssl.create_default_context, cafile=ca)
    except OSError as error:  # of which ssl.SSLError is one
        msg = f"{section}.ca: {ca}: cannot be read as certificates ({error.strerror or error})"
        raise EffectorError(msg) from None


class KnownNames(AbstractResolver):
    """Resolves names for aiohttp, whose own resolver starts a look-up for each request.

    A look-up that hangs holds one of the few threads that also read passwords and write notes, until the name service
    gives up. In an outage the name service is often the first to go.
    """

    def __init__(self) -> None:
        self._names: dict[str, Resolver] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host, whatever their family: aiohttp chooses. Raises OSError if none is known."""
        del family
        name = self._names.setdefault(host, Resolver(host, OSError))
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await name.addresses()
        ]

    async def close(self) -> None:
        """Wait for no look-up any more."""
        for name in self._names.values():
            name.close()
