"""Verification of the other end over HTTPS: by a pinned certificate, or by an authority."""

import asyncio
import ssl

import aiohttp

from powerguard.effectors.base import EffectorError

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
