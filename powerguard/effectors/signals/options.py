"""Settings of the effector `signals`: whether a trainer that draws on after it was told to pause may be signalled."""

from typing import Final, Literal

from pydantic import Field

from powerguard.options import Options

SIGNAL_SOCKET: Final = "/run/powerguard-signal/signal.sock"
"""Where powerguard-signal.socket listens (systemd/powerguard-signal.socket)."""


class SignalsOptions(Options):
    """Whether trainers are signalled that draw power on although they were told to pause.

    kind: none leaves their processes alone; helper stops, and at last ends, them through the root helper
        powerguard-signal, which finds a process by its socket in /run/powerguard-trainers.
    socket: where the helper listens; differs from the default in tests and in unusual layouts.
    """

    kind: Literal["none", "helper"] = Field(default="none", examples=["helper"])
    socket: str = Field(
        default=SIGNAL_SOCKET,
        pattern=r"^/[^\x00]+$",
        max_length=107,  # sun_path of unix(7) has 108 bytes
        examples=[SIGNAL_SOCKET],
        json_schema_extra={"x-wanted": "an absolute path of at most 107 characters"},
    )
