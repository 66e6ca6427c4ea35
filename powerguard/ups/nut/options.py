"""Settings of the `nut` source. Kept apart, so that reading the settings loads no network code."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from powerguard.options import AbsolutePath, Host, Options, Secret

NutName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        json_schema_extra={"x-wanted": "a name as in ups.conf: letters, digits, dots and dashes"},
    ),
]
"""Name of a device in NUT."""


class NutOptions(Options):
    """A UPS that NUT's upsd serves, on this host or another."""

    kind: Literal["nut"]
    host: Host = Field(description="Address or name of upsd.", examples=["10.0.0.9"])
    port: int = Field(default=3493, ge=1, le=65535, description="TCP port of upsd.")
    name: NutName = Field(
        description="The UPS's name in NUT: its section of ups.conf (`upsc -l HOST` lists them).", examples=["rack-a"]
    )
    user: str | None = Field(
        default=None,
        pattern=r"^[!-~]{1,64}$",
        description="User of upsd.users. With it powerguard logs in, and a primary waits for this host to finish.",
        examples=["pg"],
        json_schema_extra={"x-wanted": "a name without spaces"},
    )
    password: Secret | None = Field(default=None, description="Password of the user.")
    role: Literal["secondary", "primary"] = Field(
        default="secondary",
        description="`upsmon` line of the user in upsd.users. Use primary only if no upsmon is the primary.",
    )
    tls: Literal["required", "if-offered", "off"] = Field(
        default="if-offered",
        description="STARTTLS. required: no reading without it. if-offered: used where upsd has it; a certificate that "
        "does not verify, or TLS that hangs, is an alarm, and readings go on without login and unauthenticated. off: "
        "never asked for.",
    )
    ca: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of the authority (PEM) that signed upsd's certificate; the system's when not set.",
        examples=["/etc/powerguard/upsd-ca.pem"],
    )
    poll_s: float = Field(default=0.25, ge=0.2, le=5.0, description="Seconds from one poll to the next.")
    timeout_s: float = Field(
        default=1.0,
        ge=0.5,
        le=5.0,
        description="Seconds to wait for an answer; on battery at most 0.8, until the source counts as lost.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.user is None) != (self.password is None):
            msg = "user and password belong together"
            raise ValueError(msg)
        if self.role == "primary" and self.user is None:
            msg = "role primary needs user and password"
            raise ValueError(msg)
        if self.ca is not None and self.tls == "off":
            msg = "ca has no effect with tls: off (write tls: required)"
            raise ValueError(msg)
        return self


class OutletOptions(Options):
    """Outlets of a rack PDU that feed this host, as NUT's upsd serves them. Read in clear text, without a login."""

    kind: Literal["nut"] = Field(description="How the PDU is read: nut, through its upsd.")
    host: Host = Field(description="Address or name of upsd.", examples=["10.0.0.9"])
    port: int = Field(default=3493, ge=1, le=65535, description="TCP port of upsd.")
    name: NutName = Field(description="The PDU's name in NUT: its section of ups.conf.", examples=["pdu-a"])
    outlets: list[Annotated[int, Field(ge=1, le=999)]] = Field(
        min_length=1,
        max_length=16,
        description="Numbers of the outlets that feed this host and nothing else. Each must have `outlet.N.realpower` "
        "(`upsc NAME`).",
        examples=[[3, 4]],
    )

    @field_validator("outlets")
    @classmethod
    def _counted_once(cls, outlets: list[int]) -> list[int]:
        if len(set(outlets)) < len(outlets):
            msg = "an outlet is named twice, and would be counted twice"
            raise ValueError(msg)
        return outlets

    def as_source(self) -> NutOptions:
        """Return how upsd is reached for it."""
        return NutOptions(kind="nut", host=self.host, port=self.port, name=self.name, tls="off")
