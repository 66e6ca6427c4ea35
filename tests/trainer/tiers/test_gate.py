"""How an upload slows down, and what one may write as its address."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.trainer.tiers import Remote
from powerguard.trainer.tiers.base import Kind, TierError, folder_of
from powerguard.trainer.tiers.objects import credentials, opened
from powerguard.trainer.tiers.transfer import Gate, backoff_s
from tests.trainer.tiers.rig import SECRET, environment
from tests.trainer.tiers.rig import credentials as write_credentials


def failing(times: int, kind: Kind = Kind.SERVER) -> Callable[[], str]:
    """Fails so many times, then answers."""
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise TierError(kind, "no")
        return "yes"

    return call


def test_it_is_tried_again_until_it_works() -> None:
    gate = Gate(first_s=0.001, most_s=0.002)
    assert gate.call(failing(5)) == "yes"
    assert gate.retries == {Kind.SERVER: 5}
    assert gate.trouble is None


def test_what_waiting_does_not_help_against_is_not_tried_again() -> None:
    gate = Gate(first_s=0.001)
    with pytest.raises(TierError, match="no"):
        gate.call(failing(1, Kind.DENIED))
    assert gate.retries == {}


def test_patience_ends() -> None:
    """Counted from the last success: one that works now and then is worth going on with."""
    now, fails = [100.0], failing(10**9)

    def fail() -> str:
        now[0] += 0.1
        return fails()

    gate = Gate(first_s=0.0, most_s=0.0, patience_s=0.45, clock=lambda: now[0])
    with pytest.raises(TierError):
        gate.call(fail)
    assert gate.retries == {Kind.SERVER: 5}
    assert gate.call(failing(0)) == "yes"


def test_a_call_that_hangs_before_it_fails_uses_up_patience() -> None:
    """A store that accepts and never answers: two calls of a minute are two minutes, and a third is not made."""
    now = [100.0]
    calls = 0

    def hangs() -> None:
        nonlocal calls
        calls += 1
        now[0] += 60.0
        raise TierError(Kind.NETWORK, "no answer")

    gate = Gate(first_s=0.0, most_s=0.0, patience_s=120.0, clock=lambda: now[0])
    with pytest.raises(TierError):
        gate.call(hangs)
    assert calls == 2


def test_rests_double_are_random_and_bounded() -> None:
    rng = random.Random(1)
    rests = [backoff_s(errors, first_s=1.0, most_s=60.0, rng=rng) for errors in range(1, 2000)]
    assert all(2.0**n / 2 <= rest <= 2.0**n for n, rest in enumerate(rests[:6]))
    assert all(30.0 <= rest <= 60.0 for rest in rests[6:])
    assert len(set(rests)) == len(rests)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "checkpoints"}, "must be an absolute path, or begin with one of s3://"),
        ({"url": "ftp://host/checkpoints"}, "ftp://host/checkpoints: must be an absolute path, or begin with"),
        ({"url": "ftp://user:secret@host"}, "must not hold credentials"),
        ({"url": "s3://key:secret@bucket"}, "must not hold credentials"),
        ({"url": "s3://bucket", "endpoint": "http://key:secret@host"}, "must not hold credentials"),
        ({"url": "az://container/prefix?sig=secret"}, "must not hold credentials"),
        ({"url": "abfss://key:secret@account.dfs.core.windows.net/prefix"}, "must not hold credentials"),
        ({"url": "/nas", "keep": 0}, "keep=0"),
        ({"url": "/nas", "connections": 0}, "connections=0"),
        ({"url": "/nas", "bytes_per_s": 0.0}, "must be above 0"),
        ({"url": "/nas", "part_bytes": 0}, "part_bytes=0"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_at_once(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Remote(**options)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["gs://bucket/prefix", "az://container/prefix", "abfss://container@account.dfs.core.windows.net/prefix"],
)
def test_other_clouds_are_reached_the_same_way(url: str, tmp_path: Path) -> None:
    """Made, not asked: there is no server of theirs here."""
    with environment(AZURE_STORAGE_ACCOUNT_NAME="account"):
        assert opened(Remote(url=url), f"{url}/llm") is not None


def test_a_job_s_name_becomes_one_folder() -> None:
    assert folder_of("llm-7b.v2") == "llm-7b.v2"
    for name in ("../up", "a/b", "", "ä", ".hidden", "x" * 200):
        assert len(folder_of(name)) == 33
    assert folder_of("a/b") != folder_of("a/c")


# --- Credentials ---------------------------------------------------------------------------------------------------


def test_credentials_come_from_a_file_as_amazon_s(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id=a\naws_secret_access_key=b%c\n\n"
        "[run]\naws_access_key_id = d\naws_secret_access_key = e\naws_session_token = f\nregion = x\n"
    )
    path.chmod(0o400)
    assert credentials(path, "default") == {"access_key_id": "a", "secret_access_key": "b%c"}
    with environment(HOME=str(tmp_path)):
        assert opened(Remote(url="s3://bucket", credentials_file="~/credentials"), "s3://bucket/llm") is not None
    assert credentials(path, "run")["session_token"] == "f"
    with pytest.raises(TierError, match=r"no readable profile \[other\]"):
        credentials(path, "other")


def test_credentials_that_others_can_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="chmod 0400"):
        credentials(write_credentials(tmp_path, mode=0o640), "default")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[default]\n", b"nonsense", b"[default]\n" * 2, b"x" * 2_000_000]
)
def test_a_broken_file_of_credentials_is_reported_and_never_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(content + SECRET.encode())
    path.chmod(0o600)
    with pytest.raises(TierError) as caught:
        credentials(path, "default")
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_credentials_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file"):
        credentials(tmp_path / "none", "default")
