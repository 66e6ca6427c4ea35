"""Ciphers of version 3's privacy (RFC 3414 8, RFC 3826), out of `cryptography`; loaded where a user has privacy.

What they promise: `snmp_usm.Privacy`.
"""

from typing import Final

from cryptography.hazmat.decrepit.ciphers.algorithms import TripleDES
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from powerguard.sources.snmp_options import PrivProtocol

_BLOCK: Final = 8


class Aes:
    """AES in CFB mode, of the key's length (RFC 3826 3.1)."""

    def encrypted(self, key: bytes, boots: int, time_s: int, number: int, plain: bytes) -> tuple[bytes, bytes]:
        """Have the number as the salt."""
        salt = (number % 2**64).to_bytes(8, "big")
        encryptor = self._cipher(key, boots, time_s, salt).encryptor()
        return encryptor.update(plain) + encryptor.finalize(), salt

    def decrypted(self, key: bytes, boots: int, time_s: int, salt: bytes, text: bytes) -> bytes:
        """Decrypt anything: what was no ciphertext becomes rubbish."""
        decryptor = self._cipher(key, boots, time_s, salt).decryptor()
        return decryptor.update(text) + decryptor.finalize()

    @staticmethod
    def _cipher(key: bytes, boots: int, time_s: int, salt: bytes) -> "Cipher[CFB]":
        return Cipher(algorithms.AES(key), CFB(boots.to_bytes(4, "big") + time_s.to_bytes(4, "big") + salt))


class Des:
    """DES in CBC mode (RFC 3414 8.1.1). Triple DES with one key three times is DES."""

    def encrypted(self, key: bytes, boots: int, time_s: int, number: int, plain: bytes) -> tuple[bytes, bytes]:  # noqa: ARG002 - the salt has no time
        """Have boots and the number as the salt."""
        salt = boots.to_bytes(4, "big") + (number % 2**32).to_bytes(4, "big")
        encryptor = self._cipher(key, salt).encryptor()
        return encryptor.update(plain + bytes(-len(plain) % _BLOCK)) + encryptor.finalize(), salt

    def decrypted(self, key: bytes, boots: int, time_s: int, salt: bytes, text: bytes) -> bytes:  # noqa: ARG002
        """Decrypt whole blocks. Raises ValueError."""
        if not text or len(text) % _BLOCK:
            msg = "no whole blocks"
            raise ValueError(msg)
        decryptor = self._cipher(key, salt).decryptor()
        return decryptor.update(text) + decryptor.finalize()

    @staticmethod
    def _cipher(key: bytes, salt: bytes) -> "Cipher[modes.CBC]":
        start = bytes(one ^ other for one, other in zip(key[8:16], salt, strict=True))
        return Cipher(TripleDES(key[:8] * 3), modes.CBC(start))


_AES: Final = Aes()
CIPHERS: Final[dict[PrivProtocol, Aes | Des]] = {"DES": Des(), "AES": _AES, "AES-192": _AES, "AES-256": _AES}
