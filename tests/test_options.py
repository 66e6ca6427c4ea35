"""Settings classes are strict and closed, and a secret is had only from where nobody else can read it."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from powerguard.options import MAX_SECRET_BYTES, Options, Secret, SecretError

SECRET = b"hunter2"


class Example(Options):
    number: float = 1.0
    secret: Secret | None = None


def kept(path: Path, content: bytes = SECRET, mode: int = 0o400) -> Secret:
    path.write_bytes(content)
    path.chmod(mode)
    return Secret(file=str(path))


@pytest.mark.parametrize("given", [{"number": "1"}, {"number": True}, {"numbre": 1.0}, {"number": None}])
def test_nothing_is_coerced_and_nothing_unknown_passes(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Example.model_validate(given)


def test_nothing_changes_later() -> None:
    with pytest.raises(ValidationError):
        Example().number = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("given", [{}, {"credential": "a", "file": "/a"}])
def test_a_secret_is_kept_in_exactly_one_place(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="exactly one of credential and file"):
        Secret.model_validate(given)


@pytest.mark.parametrize("given", [{"credential": "../x"}, {"credential": "a/b"}, {"credential": ".."}, {"file": "x"}])
def test_a_secret_is_not_looked_for_elsewhere(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Secret.model_validate(given)


@pytest.mark.parametrize("content", [b"hunter2", b"hunter2\n", b"hunter2\r\n"])
def test_a_file_is_read_without_its_last_line_end(tmp_path: Path, content: bytes) -> None:
    assert kept(tmp_path / "s", content).read() == SECRET


def test_spaces_and_other_bytes_belong_to_the_secret(tmp_path: Path) -> None:
    assert kept(tmp_path / "s", b" \xff\x00a b \n").read() == b" \xff\x00a b "


def test_a_credential_is_read_from_the_folder_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd gives 0440 to some of them; the folder itself is closed to others."""
    (tmp_path / "snmp-auth").write_bytes(SECRET)
    (tmp_path / "snmp-auth").chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert Secret(credential="snmp-auth").read() == SECRET


def test_without_systemd_a_credential_says_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(SecretError, match=r"systemd has not given it .* powerguard secret set snmp-auth"):
        Secret(credential="snmp-auth").read()


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o444, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretError, match=r"s: other users can read this secret \(chmod 0400 "):
        kept(tmp_path / "s", mode=mode).read()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the secret is empty"), (b"\n", "the secret is empty"), (b"x" * (MAX_SECRET_BYTES + 1), "is larger than")],
)
def test_a_file_without_a_secret(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(SecretError, match=reason):
        kept(tmp_path / "s", content).read()


def test_what_is_no_file_never_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o400)
    for path, reason in (
        (tmp_path / "pipe", "is not a file"),
        (tmp_path, "is not a file"),
        (Path("/dev/zero"), "is not"),
    ):
        with pytest.raises(SecretError, match=reason):
            Secret(file=str(path)).read()
    with pytest.raises(SecretError, match="No such file or directory"):
        Secret(file=str(tmp_path / "absent")).read()


def test_the_secret_is_in_no_text_of_its_reference(tmp_path: Path) -> None:
    secret = kept(tmp_path / "s")
    secret.read()
    assert (
        SECRET.decode() not in f"{secret!r} {secret} {secret.model_dump()} {Example(secret=secret).model_dump_json()}"
    )
