"""The base of every settings class: strict, closed, frozen models, and secrets that never show."""

import ipaddress
import os
import pwd
import stat
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_SECRET_BYTES: Final = 16384
"""Largest secret; a longer file was named by mistake."""
SECRETS: Final = "/etc/powerguard/secrets"
"""Where root keeps them, a file for each, named as the credential is. The daemon cannot enter it; systemd can."""
CREDENTIAL_NAME: Final = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$"
"""No slash and no "..": it is a name in a folder."""


class Options(BaseModel):
    """Base of every settings class: no coercion, no unknown keys, no later change."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _ip_address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        msg = "must be an IP address of this host, such as 127.0.0.1 or 10.0.0.20 (a name may resolve to anything)"
        raise ValueError(msg) from None
    return text


def _without_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if port.isdecimal() and host and (":" not in host or (host[0], host[-1]) == ("[", "]")):
        msg = f"must be an address or a name without a port: write host: {host.strip('[]')} and port: {port}"
        raise ValueError(msg)
    return text


Host = Annotated[
    str,
    AfterValidator(_without_port),
    Field(min_length=1, max_length=253),
]
"""Where a peer is reached; its port has a key of its own."""
ListenAddress = Annotated[
    str,
    AfterValidator(_ip_address),
    Field(json_schema_extra={"x-wanted": "an IP address of this host, such as 127.0.0.1 or 10.0.0.20"}),
]
AbsolutePath = Annotated[
    str,
    # the length not in the pattern: a counted repetition of 4095 costs 8 MB in pydantic's regex engine
    Field(pattern=r"^/[^\x00]+$", max_length=4096, json_schema_extra={"x-wanted": "an absolute path"}),
]
SocketPath = Annotated[
    str,
    Field(
        pattern=r"^/[^\x00]+$",
        max_length=107,  # sun_path of unix(7) has 108 bytes
        json_schema_extra={"x-wanted": "an absolute path of at most 107 characters"},
    ),
]
"""Of a unix socket."""


def _uid(value: object) -> object:
    """Return the number of a user's name, NO_USER of an unknown one; everything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, ValueError):
        return NO_USER


NO_USER: Final = 2**32 - 1
"""(uid_t) -1, which no user has: a directory of users that does not answer at boot must not keep the daemon down."""
Uid = Annotated[
    int,
    BeforeValidator(_uid, json_schema_input_type=int | str),
    Field(ge=0, le=NO_USER, json_schema_extra={"x-wanted": "a user's name or number"}),
]
"""A user of this host: a name is looked up when the settings are read."""
Fingerprint = Annotated[
    str,
    Field(
        pattern=r"^([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2}$",
        json_schema_extra={"x-wanted": "64 hexadecimal digits, with or without colons"},
    ),
]
"""SHA-256 of a certificate, as `openssl x509 -fingerprint -sha256` prints it."""


class SecretError(Exception):
    """A secret that cannot be read: what, where, and the fix."""


class Secret(Options):
    """Where a secret is kept: a systemd credential, or a file of its owner only. Never the secret itself."""

    credential: str | None = Field(
        default=None,
        pattern=CREDENTIAL_NAME,
        max_length=255,
        description="Name of a systemd credential (LoadCredential= of powerguard.service).",
        examples=["snmp-auth"],
        json_schema_extra={"x-wanted": "a name of letters, digits, dots and dashes"},
    )
    file: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of a file that only its owner can read (chmod 0400).",
        examples=["/etc/powerguard/snmp-auth"],
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.credential is None) == (self.file is None):
            msg = "must name exactly one of credential and file"
            raise ValueError(msg)
        return self

    def read(self) -> bytes:
        """Return the secret without its trailing newline.

        Raises SecretError when it is missing, empty, or readable by group or others.
        """
        if self.credential is not None:
            folder = os.environ.get("CREDENTIALS_DIRECTORY")
            if folder is None:
                msg = f"credential {self.credential}: systemd has not given it to this process: {self._right}"
                raise SecretError(msg)
            path = Path(folder) / self.credential
        else:
            path = Path(str(self.file))
        try:
            secret = _read(path, private=self.file is not None)
        except OSError as error:
            msg = f"{path}: {error.strerror}"
            if self.credential is not None:
                msg = f"credential {self.credential}: {error.strerror}: {self._right}"
            raise SecretError(msg) from error
        if len(secret) > MAX_SECRET_BYTES:
            msg = f"{path}: is larger than {MAX_SECRET_BYTES} bytes, so it is not a password or token"
            raise SecretError(msg)
        secret = secret.rstrip(b"\r\n")
        if not secret:
            msg = f"{path}: the secret is empty"
            if self.credential is not None:  # As the unit passes it where its file is not there.
                msg = f"credential {self.credential}: is missing: {self._right}"
            raise SecretError(msg)
        return secret

    @property
    def _right(self) -> str:
        return (
            f"powerguard secret set {self.credential}; powerguard install (for a sentinel: LoadCredential= in its "
            "unit); restart the service"
        )


def _read(path: Path, *, private: bool) -> bytes:
    """Read a file that must be regular and, where `private`, closed to group and others."""
    # Opened once and looked at by its descriptor: what is checked is what is read. NONBLOCK: a pipe never waits.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            msg = f"{path}: is not a file"
            raise SecretError(msg)
        if private and stat.S_IMODE(mode) & 0o077:
            msg = f"{path}: other users can read this secret (chmod 0400 {path})"
            raise SecretError(msg)
        return os.read(descriptor, MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
