"""What hosts and sentinels say: whole or refused; signed, or it does not count; a challenge is good once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.effectors.sentinel import protocol as wire

KEY = b"k" * 32
ASKED = wire.Request(
    challenge="c" * 43,
    nonce="0" * 32,
    host="n1",
    feeds=("a", "b"),
    outage="o1",
    boot_id="b1",
    in_s=90.0,
    valid_s=3600.0,
)


def body(**changed: Any) -> bytes:  # noqa: ANN401
    request = {**json.loads(wire.encode("store", ASKED)), **changed}
    return json.dumps({name: value for name, value in request.items() if value is not ...}).encode()


@pytest.mark.parametrize("kind", wire.PATHS)
def test_what_is_written_is_read(kind: str) -> None:
    output = wire.decode(kind, wire.encode(kind, ASKED))
    assert wire.encode(kind, output) == wire.encode(kind, ASKED)
    assert (output.host, output.challenge) == ("n1", "c" * 43)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"schema_version": 2}, "schema_version must be 1"),
        ({"host": ...}, "must have exactly schema_version"),
        ({"more": 1}, "must have exactly"),
        ({"host": "../x"}, "host must be text"),
        ({"host": ["n1"]}, "host must be text"),
        ({"nonce": "0" * 31}, "nonce must be text"),
        ({"outage": "o\n1"}, "outage must be text"),
        ({"outage": "o" * 129}, "outage must be text"),
        ({"feeds": []}, "feeds must be 1 to 16"),
        ({"feeds": ["a", "a"]}, "feeds must be 1 to 16"),
        ({"feeds": ["a", 1]}, "feeds must be 1 to 16"),
        ({"feeds": "a"}, "feeds must be 1 to 16"),
        ({"in_s": -1}, "in_s must be seconds, 0 to 86400"),
        ({"in_s": True}, "in_s must be seconds"),
        ({"in_s": float("nan")}, "in_s must be seconds"),
        ({"in_s": 10**400}, "in_s must be seconds"),
        ({"valid_s": 5}, "valid_s must be seconds, 60 to"),
        ({"valid_s": "60"}, "valid_s must be seconds"),
        ({"outage": "o" * 5000}, "at most 4096 bytes"),
    ],
)
def test_a_request_is_whole_or_refused(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(wire.SentinelWireError, match=what):
        wire.decode("store", body(**changed))


@given(
    st.one_of(
        st.binary(max_size=300), st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode())
    )
)
def test_garbage_is_refused_in_one_way(raw: bytes) -> None:
    for kind in wire.PATHS:
        with pytest.raises(wire.SentinelWireError):
            wire.decode(kind, raw)


def test_a_deep_nest_is_refused() -> None:
    with pytest.raises(wire.SentinelWireError):
        wire.decode("hello", b"[" * 4096)


def test_a_signature_holds_for_one_path_one_body_one_key() -> None:
    signature = wire.sign_request(KEY, "/v1/store", b"{}")
    assert wire.is_signed(wire.sign_request(KEY, "/v1/store", b"{}"), signature)
    others = [(KEY, "/v1/withdraw", b"{}"), (KEY, "/v1/store", b"{} "), (b"K" * 32, "/v1/store", b"{}")]
    assert not any(wire.is_signed(wire.sign_request(*other), signature) for other in others)
    assert not wire.is_signed(signature, None)
    assert not wire.is_signed(signature, signature.upper())
    answer = wire.sign_answer(KEY, signature, 200, b"{}")
    assert not wire.is_signed(wire.sign_answer(KEY, signature, 503, b"{}"), answer)
    assert not wire.is_signed(wire.sign_answer(KEY, signature[::-1], 200, b"{}"), answer)


def test_a_challenge_is_ours_young_and_good_once() -> None:
    ours = wire.Challenges(b"s" * 32)
    result = ours.make(100.0, b"saltsalt")
    assert ours.is_good(result, 100.0)
    assert ours.is_good(result, 100.0 + wire.CHALLENGE_S - 0.01)
    assert not ours.is_good(result, 100.01 + wire.CHALLENGE_S)
    assert not wire.Challenges(b"t" * 32).is_good(result, 100.0), "of before a restart"
    assert not ours.is_good(result[:-4] + "AAA=", 100.0)
    assert not ours.is_good("\xe9", 100.0)
    assert not ours.is_good("", 100.0)
    ours.use(result, 101.0)
    assert not ours.is_good(result, 101.0)
    assert not ours.is_good(result + "\n", 101.0), "another spelling of the same"
    for number in range(1000):
        ours.use(ours.make(200.0 + number, b"saltsalt"), 200.0 + number)
    assert len(ours._used) < 40, "what is too old anyway is not kept"
