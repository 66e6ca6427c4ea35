"""Keys, proofs and ciphers of version 3: RFC 3414's own examples, and pysnmp's, which shares no code with ours."""

import itertools
from pathlib import Path

import pytest
from pysnmp.entity import config
from pysnmp.proto.rfc1902 import univ

from powerguard.protocols import snmp_ber as ber
from powerguard.protocols import snmp_v3 as codec
from powerguard.sources.snmp_usm import Keys, UndecipherableError, User
from tests.sources.snmp_helpers import options, secret

ENGINE = bytes.fromhex("000000000000000000000002")
AUTHS = {
    "MD5": config.USM_AUTH_HMAC96_MD5,
    "SHA": config.USM_AUTH_HMAC96_SHA,
    "SHA-224": config.USM_AUTH_HMAC128_SHA224,
    "SHA-256": config.USM_AUTH_HMAC192_SHA256,
    "SHA-384": config.USM_AUTH_HMAC256_SHA384,
    "SHA-512": config.USM_AUTH_HMAC384_SHA512,
}
PRIVS = {
    "DES": config.USM_PRIV_CBC56_DES,
    "AES": config.USM_PRIV_CFB128_AES,
    "AES-192": config.USM_PRIV_CFB192_AES,
    "AES-256": config.USM_PRIV_CFB256_AES,
}
PAIRS = list(itertools.product(AUTHS, PRIVS))
SCOPED = codec.scoped(ENGINE, b"", 0xA0, b"\x02\x01\x07\x02\x01\x00\x02\x01\x00\x30\x00")


def keys(folder: Path, auth: str, priv: str | None = None, engine: bytes = ENGINE) -> Keys:
    folder.mkdir(exist_ok=True)
    more = {"auth": secret(folder, f"{auth}-{priv}", "maplesyrup"), "auth_protocol": auth}
    if priv is not None:
        more |= {"priv": secret(folder, f"{auth}-{priv}-priv", "another-syrup"), "priv_protocol": priv}
    return User.read("pg", options(161, version=3, user="pg", **more)).keys(engine)


@pytest.mark.parametrize(
    ("auth", "key"),
    [("MD5", "526f5eed9fcce26f8964c2930787d82b"), ("SHA", "6695febc9288e36282235fc7151f128497b38f3f")],
)
def test_the_examples_of_rfc_3414(auth: str, key: str, tmp_path: Path) -> None:
    """A.3.1 and A.3.2: the passphrase "maplesyrup" for the engine 00 .. 02."""
    assert keys(tmp_path, auth)._auth.hex() == key


@pytest.mark.parametrize(("auth", "priv"), PAIRS)
def test_keys_and_ciphers_are_those_of_others(auth: str, priv: str, tmp_path: Path) -> None:
    """Each protocol with each: the same localized keys; what we encipher and prove pysnmp reads, and the other way."""
    ours = keys(tmp_path, auth, priv)
    prover, cipher = config.AUTH_SERVICES[AUTHS[auth]], config.PRIV_SERVICES[PRIVS[priv]]
    engine = univ.OctetString(ENGINE)
    auth_key = prover.localize_key(prover.hash_passphrase(b"maplesyrup"), engine)
    priv_key = cipher.localize_key(AUTHS[auth], cipher.hash_passphrase(AUTHS[auth], b"another-syrup"), engine)
    assert (ours._auth, ours._priv) == (bytes(auth_key), bytes(priv_key))

    message = codec.parse(ours.sealed(5, 3, 7, 1000, SCOPED))
    assert ours.proves(message)
    proved = prover.authenticate_incoming_message(auth_key, univ.OctetString(message.digest), message.data)
    assert proved == message.unsigned
    place = (message.boots, message.time_s, univ.OctetString(message.salt))
    told = bytes(cipher.decrypt_data(univ.OctetString(priv_key), place, univ.OctetString(message.payload)))
    assert (told[: len(SCOPED)], len(told) - len(SCOPED)) == (SCOPED, -len(SCOPED) % 8 if priv == "DES" else 0)

    text, salt = cipher.encrypt_data(univ.OctetString(priv_key), (7, 1000, None), SCOPED)
    theirs, at = codec.seal(
        message_id=6,
        flags=3,
        engine=(ENGINE, 7, 1000),
        user=b"pg",
        salt=bytes(salt),
        digest_bytes=prover.digest_length,
        payload=ber.element(ber.OCTETS, bytes(text)),
    )
    answer = codec.parse(theirs[:at] + ours._digest(theirs) + theirs[at + prover.digest_length :])
    assert codec.parse_scoped(ours.opened(answer)) == codec.parse_scoped(SCOPED)


def test_an_engine_of_noughts_is_no_place_for_a_digest(tmp_path: Path) -> None:
    """Whoever looks for the digest's noughts finds those of the engine id; we know where it stands."""
    ours = keys(tmp_path, "SHA", None, bytes(12))
    whole = ours.sealed(1, 1, 0, 0, SCOPED)
    message = codec.parse(whole)
    assert message.engine_id == bytes(12)
    assert ours.proves(message)
    assert not ours.proves(codec.parse(whole[:-1] + b"\x01"))


@pytest.mark.parametrize(("priv", "text"), [("DES", b""), ("DES", bytes(7)), ("AES", bytes(8))])
def test_what_no_cipher_has_made(priv: str, text: bytes, tmp_path: Path) -> None:
    ours = keys(tmp_path, "SHA", priv)
    salt = bytes(8 if priv == "DES" else 7)
    whole, _ = codec.seal(
        message_id=1,
        flags=3,
        engine=(ENGINE, 1, 1),
        user=b"pg",
        salt=salt,
        digest_bytes=12,
        payload=ber.element(ber.OCTETS, text),
    )
    with pytest.raises(UndecipherableError):
        ours.opened(codec.parse(whole))


def test_a_salt_of_des_names_the_start_of_the_engine(tmp_path: Path) -> None:
    """RFC 3414 8.1.1.1: boots, and a number that goes on for each message whoever's key it is."""
    ours = keys(tmp_path, "SHA", "DES")
    salts = [codec.parse(ours.sealed(1, 3, 258, 5, SCOPED)).salt for _ in range(300)]
    assert {salt[:4] for salt in salts} == {(258).to_bytes(4, "big")}
    assert len(set(salts)) == 300
