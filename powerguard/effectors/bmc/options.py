"""The settings of the BMC. Imports no IPMI library, so that reading the settings stays cheap."""

from typing import Literal, Self

from pydantic import Field, model_validator

from powerguard.options import Options, Secret


class BmcOptions(Options):
    """How the host's own BMC is reached, and what may be done to it.

    kind: the engine. "none": there is none, so nobody makes sure that the host powers on by itself.
    host: address or name of the BMC on its own network.
    port: UDP port of IPMI over LAN (RMCP+).
    user: account of the BMC with privilege level Operator; no more is needed.
    password: where its password is kept.
    policy: "ensure" sets the power restore policy to always-on where it is anything else; "observe" only reads it.
    """

    kind: Literal["none", "ipmi-lan"] = Field(examples=["ipmi-lan"])
    host: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:%-]{1,253}$", examples=["10.0.8.21"])
    port: int = Field(default=623, ge=1, le=65535)
    user: str | None = Field(default=None, min_length=1, max_length=16, examples=["powerguard"])
    password: Secret | None = Field(default=None, examples=[{"credential": "bmc"}])
    policy: Literal["ensure", "observe"] = "ensure"

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        wanted = ("host", "user", "password")
        if self.kind == "none":
            given = [name for name in wanted if getattr(self, name) is not None]
            if given:
                msg = f"kind none uses no {given[0]} (write kind: ipmi-lan, or leave {', '.join(given)} out)"
                raise ValueError(msg)
        else:
            missing = [name for name in wanted if getattr(self, name) is None]
            if missing:
                msg = f"kind {self.kind} needs {', '.join(missing)}"
                raise ValueError(msg)
        return self
