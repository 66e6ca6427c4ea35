"""Settings of the `snmp` source. Kept apart, so that reading the settings loads no SNMP library."""

from typing import Literal, Self

from pydantic import Field, model_validator

from powerguard.options import Host, Options, Secret

AuthProtocol = Literal["MD5", "SHA", "SHA-224", "SHA-256", "SHA-384", "SHA-512"]
PrivProtocol = Literal["DES", "AES", "AES-192", "AES-256"]


class SnmpOptions(Options):
    """A UPS network card that is polled over SNMP."""

    kind: Literal["snmp"]
    host: Host = Field(description="Address or name of the card.", examples=["10.0.0.5"])
    port: int = Field(default=161, ge=1, le=65535, description="UDP port of the card.")
    version: Literal[1, "2c", 3] = Field(
        default="2c",
        description="SNMP version. Only 3 with `auth` cannot be forged; 1 is for cards that know no other.",
    )
    community: Secret | None = Field(default=None, description="Community of versions 1 and 2c; `public` when not set.")
    user: str | None = Field(
        default=None, min_length=1, max_length=32, description="User of version 3.", examples=["pg"]
    )
    auth: Secret | None = Field(
        default=None, description="Authentication passphrase of version 3, 8 characters or more."
    )
    auth_protocol: AuthProtocol = Field(default="SHA", description="Authentication protocol of version 3.")
    priv: Secret | None = Field(default=None, description="Privacy passphrase of version 3, 8 characters or more.")
    priv_protocol: PrivProtocol = Field(default="AES", description="Privacy protocol of version 3.")
    poll_s: float = Field(default=1.0, ge=0.5, le=10.0, description="Seconds from one poll to the next.")
    timeout_s: float = Field(default=1.0, ge=0.5, le=5.0, description="Seconds to wait for an answer; asked twice.")
    profile: str | None = Field(
        default=None,
        description="UPS family (`powerguard/profiles`); found by probing when not set.",
        examples=["rfc1628"],
    )

    @model_validator(mode="after")
    def _credentials_fit(self) -> Self:
        if self.version == 3:
            if self.user is None:
                msg = "version 3 needs a user"
                raise ValueError(msg)
            if len(self.user.encode()) > 32:
                msg = "user is longer than 32 bytes of UTF-8, the most that SNMP knows (RFC 3414)"
                raise ValueError(msg)
            if self.community is not None:
                msg = "version 3 knows no community (write user, auth and priv)"
                raise ValueError(msg)
            if self.priv is not None and self.auth is None:
                msg = "priv needs auth as well"
                raise ValueError(msg)
        elif self.user is not None or self.auth is not None or self.priv is not None:
            msg = f"user, auth and priv belong to version 3, and version is {self.version}"
            raise ValueError(msg)
        return self
