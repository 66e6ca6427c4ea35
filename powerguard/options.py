"""What every settings class is made of: strict, closed, frozen models, and secrets that never show."""

import os
import stat
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Options(BaseModel):
    """Base of every settings class: nothing is coerced, nothing unknown passes, nothing changes later."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SecretError(Exception):
    """A secret that cannot be had: what, where, and what would be right."""


class Secret(Options):
    """Where a secret is kept: a systemd credential, or a file that nobody else can read. Never the secret itself."""

    credential: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}$",  # no slash and no "..": it is a name in a folder
        description="Name of a systemd credential (LoadCredential= of powerguard.service).",
        examples=["snmp-auth"],
        json_schema_extra={"x-wanted": "a name of letters, digits, dots and dashes"},
    )
    file: str | None = Field(
        default=None,
        pattern=r"^/[^\x00]{1,4095}$",
        description="Absolute path of a file that only its owner can read (chmod 0400).",
        examples=["/etc/powerguard/secrets/snmp-auth"],
        json_schema_extra={"x-wanted": "an absolute path"},
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
                msg = f"credential {self.credential}: not started by systemd with LoadCredential={self.credential}:..."
                raise SecretError(msg)
            path = Path(folder) / self.credential
        else:
            path = Path(str(self.file))
        try:
            if self.file is not None and stat.S_IMODE(path.stat().st_mode) & 0o077:
                msg = f"{path}: others can read this secret (chmod 0400 {path})"
                raise SecretError(msg)
            secret = path.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            msg = f"{path}: {error.strerror}"
            raise SecretError(msg) from error
        if not secret:
            msg = f"{path}: the secret is empty"
            raise SecretError(msg)
        return secret
