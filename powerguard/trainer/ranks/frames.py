"""The frames of our own rank store: small messages, and a seal on each so that only who knows the secret is heard.

    frame    length (4 bytes, big-endian) of the rest | seal (16 bytes) | body
    body     what is asked (1 byte) | length of the key (1 byte) | key | the rest

A connection begins with the server's nonce and the client's nonce, 32 bytes each, unsealed. From these and the run's
secret both make the key of this connection (keyed BLAKE2b, RFC 7693). A seal is BLAKE2b under that key over the
direction, the number of the frame and the body: forged, replayed, reordered and reflected frames all fail. Nothing is
encrypted: what goes over are steps, digests and names of tensors.
"""

import hmac
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from powerguard.trainer.ranks.base import MAX_KEY, MAX_VALUE_BYTES

NONCE_BYTES: Final = 32
MAX_FRAME_BYTES: Final = MAX_VALUE_BYTES + MAX_KEY + 64
_SEAL_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
_NUMBER: Final = struct.Struct(">Q")

SET, GET, CHECK, CLAIM, ADD, DELETE = b"S", b"G", b"C", b"K", b"A", b"D"
VALUE, NOTHING, REFUSED = b"V", b"N", b"R"


class FrameError(Exception):
    """The peer is none of ours, or broken: its connection is worth nothing any more."""


class Sealer:
    """Both directions of one connection, as one of its ends sees them."""

    def __init__(self, secret: bytes, server_nonce: bytes, client_nonce: bytes, *, server: bool) -> None:
        self._key = blake2b(server_nonce + client_nonce, key=secret[:64], person=b"powerguard-ranks").digest()
        self._out, self._in = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._heard = 0
        self._buffer = bytearray()

    def frame(self, body: bytes) -> bytes:
        """Return a body as it goes over the wire."""
        seal = self._seal(self._out, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(_SEAL_BYTES + len(body)) + seal + body

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are whole after these bytes. Raises FrameError on the first that is not the peer's."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not _SEAL_BYTES < length <= MAX_FRAME_BYTES:
                msg = f"a frame of {length} bytes"
                raise FrameError(msg)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            seal, body = bytes(self._buffer[4:20]), bytes(self._buffer[20:end])
            del self._buffer[:end]
            if not hmac.compare_digest(seal, self._seal(self._in, self._heard, body)):
                msg = "a seal that does not fit: the two ends do not have the same secret"
                raise FrameError(msg)
            self._heard += 1
            yield body

    def _seal(self, direction: bytes, number: int, body: bytes) -> bytes:
        return blake2b(direction + _NUMBER.pack(number) + body, key=self._key, digest_size=_SEAL_BYTES).digest()


def packed(kind: bytes, key: str, rest: bytes = b"") -> bytes:
    """Return a request's body."""
    name = key.encode("ascii")
    return kind + bytes([len(name)]) + name + rest


def unpacked(body: bytes) -> tuple[bytes, str, bytes]:
    """Return kind, key and the rest of a request's body. Raises FrameError."""
    end = 2 + (body[1] if len(body) > 1 else MAX_FRAME_BYTES)
    if len(body) < end or end > 2 + MAX_KEY:
        msg = "a request that is cut short"
        raise FrameError(msg)
    try:
        return body[:1], body[2:end].decode("ascii"), body[end:]
    except UnicodeDecodeError as error:
        msg = "a key that is not ASCII"
        raise FrameError(msg) from error
