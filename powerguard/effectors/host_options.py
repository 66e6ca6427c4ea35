"""Settings of the effector `host`: how this host is powered off, and how training is started again."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from powerguard.options import Options

OFF_FIFO: Final = "/run/powerguard-off/word"
"""Where powerguard-off.socket listens (systemd/powerguard-off.socket)."""


class HostOptions(Options):
    """How the host is powered off.

    kind: systemd writes a word to the root helper powerguard-off; command runs a program of the site's own.
    force_after_s: seconds from the order until everything that still runs is killed and the power is cut, within 2
        seconds more. Longer than a usual stop of this host, and 30 s shorter than what the UPS gives.
    command: for kind command only. `{deadline_s}` in it becomes the whole seconds that are left; it must not wait
        for the shutdown to end.
    fifo: for kind systemd only; differs from the default in tests and in unusual layouts.
    late_reboot: for kind systemd only: utility that is back for good when all units have stopped makes the power-off a
        reboot, as AC never drops then, and no BMC powers the host on. false: it stays off.
    """

    kind: Literal["systemd", "command"] = "systemd"
    force_after_s: float = Field(default=110, ge=10, le=3600, examples=[110])
    command: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, examples=[["/usr/local/sbin/site-power-off", "--within", "{deadline_s}"]]
    )
    fifo: str = Field(default=OFF_FIFO, pattern=r"^/", examples=[OFF_FIFO])
    late_reboot: bool = Field(default=True, examples=[True])

    @model_validator(mode="after")
    def _command_goes_with_its_kind(self) -> Self:
        if self.kind == "command" and not self.command:
            msg = "kind command needs command: a list of words, such as [/usr/local/sbin/site-power-off]"
            raise ValueError(msg)
        if self.kind != "command" and self.command:
            msg = f"command is for kind command only, and kind is {self.kind}: set kind: command, or remove command"
            raise ValueError(msg)
        return self


class ResumeOptions(Options):
    """What starts training after a return from power-off, once power and battery allow it.

    target: a systemd unit that is started; the polkit rule that comes with powerguard allows the default one.
    command: run in its place; empty to start the target.
    gpus: as-before lets training wait for a person where a GPU is missing or wants a reset after a return; any lets it
        start.
    verify: how the newest checkpoint is looked at before training starts. manifest: names and sizes, in a moment;
        training verifies every byte when it loads it. full: every byte, as far as that can be done in 20 seconds.
    """

    target: str = Field(
        default="powerguard-resume.target",
        pattern=r"^[A-Za-z0-9:_.@\\-]+\.(target|service)$",
        examples=["powerguard-resume.target"],
    )
    command: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, examples=[["/usr/local/bin/start-training"]]
    )
    gpus: Literal["as-before", "any"] = Field(default="as-before", examples=["as-before"])
    verify: Literal["manifest", "full"] = Field(default="manifest", examples=["manifest"])
