"""Settings of one trainer, and of trainers that are found by their sockets."""

import ipaddress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from powerguard.options import Options, Secret, Uid

MAX_SOCKET_PATH = 107
DEFAULT_CHECKPOINT_S = 60.0


Argument = Annotated[
    str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$", json_schema_extra={"x-wanted": "text"})
]


class SignalOptions(Options):
    """A trainer that saves at a signal, through the root helper powerguard-signal."""

    kind: Literal["signal"] = Field(description="How the trainer is reached.")
    unit: str = Field(
        pattern=r"^[A-Za-z0-9:_.@\\-]{1,240}\.(service|scope)$",
        description="Unit that it runs in, as listed with its signal in /etc/powerguard/signals.",
        examples=["train.service"],
    )
    signal: Literal["USR1", "USR2", "TERM"] = Field(
        description="Signal at which it saves. Most trainers that save at TERM end afterwards.", examples=["USR1"]
    )


class CommandOptions(Options):
    """A trainer that a program makes save: Slurm's scontrol, a script of the site."""

    kind: Literal["command"] = Field(description="How the trainer is reached.")
    command: list[Argument] = Field(
        min_length=1,
        max_length=64,
        description="Program and arguments, started without a shell as the daemon's user. Exit status 0: the "
        "checkpoint is saved. It is killed at its deadline. Its environment has POWERGUARD_DEADLINE_S, "
        "_REASON, _EVENT and _ID.",
        examples=[["/usr/local/bin/checkpoint-llm", "--wait"]],
    )


Fallback = Annotated[SignalOptions | CommandOptions, Field(discriminator="kind")]
"""The fallbacks when HTTP brings no checkpoint."""


class Common(Options):
    """Settings of any trainer, however it is reached."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="Name in logs and metrics.",
        examples=["llm"],
    )
    checkpoint_s: float | None = Field(
        default=None, gt=0, le=86400, description="Seconds that a checkpoint takes. Used until it has been measured."
    )
    max_checkpoint_s: float = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="Longest time in seconds that the trainer may claim for a checkpoint, and the limit for "
        "one that does not report progress.",
    )
    size_bytes: int | None = Field(default=None, gt=0, description="Size of a checkpoint, if checkpoint_s is unknown.")
    write_bytes_per_s: float | None = Field(
        default=None, gt=0, description="Write speed of its disk. Used with size_bytes."
    )
    disk: str = Field(
        default="",
        description="Name for the disk of its checkpoints. The times of trainers with the same name add up; "
        "trainers without one count as sharing a disk.",
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Order of the checkpoints if there is no time for all on one disk; the highest goes first.",
    )
    checkpoint_dir: str | None = Field(
        default=None, pattern="^/", description="Folder of its checkpoints, if the trainer does not report it."
    )

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        if (self.size_bytes is None) != (self.write_bytes_per_s is None):
            msg = "size_bytes and write_bytes_per_s go together"
            raise ValueError(msg)
        if self.seed_s > self.max_checkpoint_s:
            msg = f"a checkpoint of {self.seed_s:.0f} s is longer than max_checkpoint_s ({self.max_checkpoint_s:.0f})"
            raise ValueError(msg)
        return self

    @property
    def seed_s(self) -> float:
        """Seconds that a checkpoint needs before a measurement: of the settings, else twice size over bandwidth."""
        if self.checkpoint_s is not None:
            return self.checkpoint_s
        if self.size_bytes is not None and self.write_bytes_per_s is not None:
            return 2.0 * self.size_bytes / self.write_bytes_per_s
        return min(DEFAULT_CHECKPOINT_S, self.max_checkpoint_s)

    @property
    def socket_path(self) -> str | None:
        """Path of the unix socket; None if it has none."""
        return None


class SignalTrainerOptions(SignalOptions, Common):
    """One trainer that is independent of powerguard and saves at a signal."""

    after: Literal["exit", "continue"] = Field(
        default="continue", description="What the trainer does by itself after it has saved."
    )


class CommandTrainerOptions(CommandOptions, Common):
    """One trainer that is independent of powerguard and is made to save by a program."""

    after: Literal["exit", "continue"] = Field(
        default="continue", description="What the trainer does by itself after it has saved."
    )


class TrainerOptions(Common):
    """One trainer that is reached over HTTP, on a unix socket or a TCP port."""

    kind: Literal["http"] = Field(default="http", description="How the trainer is reached.")
    url: str = Field(
        description="unix:/path/to.sock, or http://host:port.",
        examples=["unix:/run/powerguard-trainers/llm.sock", "http://127.0.0.1:5000"],
    )
    token: Secret | None = Field(default=None, description="Bearer token. Required unless the host is this one.")
    after: Literal["pause", "exit", "continue"] = Field(
        default="pause", description="What it is asked to do once its emergency checkpoint is durable."
    )
    uids: list[Uid] | None = Field(
        default=None,
        description="Users that may serve the unix socket, by name or number. Not set: any user who opens the "
        "socket first is accepted as this trainer.",
        examples=[["train"]],
    )
    fallback: Fallback | None = Field(
        default=None, description="What is tried if HTTP brings no checkpoint: a signal, or a program."
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url.startswith("unix://"):
            msg = f"must have one slash after unix: (write unix:/{url.removeprefix('unix:').lstrip('/')})"
            raise ValueError(msg)
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            if not path.startswith("/") or len(path.encode()) > MAX_SOCKET_PATH or "\0" in path:
                msg = f"needs an absolute path of at most {MAX_SOCKET_PATH} bytes after unix:"
                raise ValueError(msg)
            return url
        try:
            parts = urlsplit(url)
            sound = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
        except ValueError:
            sound = False
        else:
            sound = sound and not (parts.query or parts.fragment or parts.username or parts.password)
        if not sound:
            msg = "must be unix:/path/to.sock or http://host:port, without path, user or password"
            raise ValueError(msg)
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.token is None and not self.is_local:
            msg = "a trainer on another host needs a token (token: {credential: NAME})"
            raise ValueError(msg)
        if self.uids is not None and self.socket_path is None:
            msg = "uids has no effect with a TCP port (write url: unix:/path/to.sock, or remove uids)"
            raise ValueError(msg)
        return self

    @property
    def socket_path(self) -> str | None:
        """Path of the unix socket; None where it is a TCP port."""
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else None

    @property
    def is_local(self) -> bool:
        """It can only be on this host: a unix socket or a loopback address."""
        if self.socket_path is not None:
            return True
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def _with_kind(content: Any) -> Any:  # noqa: ANN401 - any content of a file
    return {**content, "kind": "http"} if isinstance(content, dict) and "kind" not in content else content


AnyTrainerOptions = Annotated[
    Annotated[TrainerOptions | SignalTrainerOptions | CommandTrainerOptions, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]
"""One trainer of the settings, distinguished by `kind`; http if there is none."""
