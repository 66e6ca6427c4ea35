"""Settings of the `snmp` source. Kept apart, so that reading the settings loads no SNMP library.

Settings of the trap port. Kept apart, so that reading the settings loads no SNMP library.
"""

import ipaddress
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from powerguard.options import Host, ListenAddress, Options, Secret

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
    timeout_s: float = Field(
        default=1.0, ge=0.5, le=5.0, description="Seconds to wait for an answer; each request is sent twice."
    )
    profile: str | None = Field(
        default=None,
        description="UPS family (`powerguard/ups/profiles`); found by probing when not set.",
        examples=["rfc1628"],
    )

    @field_validator("version", mode="before")
    @classmethod
    def _number(cls, version: object) -> object:
        return str(version).lower() if isinstance(version, bool) else version  # True is 1 in Python.

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
        elif (self.auth_protocol, self.priv_protocol) != ("SHA", "AES"):
            msg = f"auth_protocol and priv_protocol belong to version 3, and version is {self.version}"
            raise ValueError(msg)
        return self


MAX_USERS: Final = 16
MAX_ADDRESSES: Final = 16
EngineId = Annotated[
    str,
    Field(
        pattern=r"^(0x)?([0-9a-fA-F]{2}){5,32}$",  # SnmpEngineID of RFC 3411: 5 to 32 bytes
        json_schema_extra={"x-wanted": "5 to 32 bytes in hexadecimal, such as '80000f860300c0b7a1b2c3'"},
    ),
]
UpsName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")]


class TrapUser(Options):
    """A user of version 3 whose traps and informs are taken."""

    user: str = Field(min_length=1, max_length=32, description="Its name on the card.", examples=["pgtrap"])
    auth: Secret = Field(
        description="Authentication passphrase, 8 characters or more.",
        examples=[{"credential": "trap-auth"}],
    )
    auth_protocol: AuthProtocol = Field(default="SHA", description="Authentication protocol.")
    priv: Secret | None = Field(default=None, description="Privacy passphrase, 8 characters or more.")
    priv_protocol: PrivProtocol = Field(default="AES", description="Privacy protocol.")
    engines: dict[UpsName, EngineId] = Field(
        default_factory=dict,
        max_length=64,
        description="Engine id of each card that sends traps as this user, by the UPS's name. Without it a trap of "
        "version 3 cannot be checked; informs need none.",
        examples=[{"rack-a": "80000f860300c0b7a1b2c3"}],
        json_schema_extra={"x-keys": "a name under ups"},
    )


class TrapOptions(Options):
    """The trap port: a message that a card sends by itself causes an earlier poll, and has no other effect."""

    listen: ListenAddress = Field(
        default="0.0.0.0",  # noqa: S104 - cards are on the network; without a `traps` block there is no port at all
        description="Address to listen on; `::` for IPv6 and IPv4.",
        examples=["10.0.0.20"],
    )
    port: int = Field(
        default=1162,
        ge=1,
        le=65535,
        description="UDP port. Cards send to 162, which the daemon may not open: docs/guides/ups.md.",
        examples=[1162],
    )
    community: Secret | None = Field(
        default=None,
        description="Community that traps of versions 1 and 2c must have. Not set: any, for a trap causes a poll and "
        "no more.",
        examples=[{"credential": "trap-community"}],
    )
    communities: dict[UpsName, Secret] = Field(
        default_factory=dict,
        max_length=64,
        description="Community that only this UPS's card puts into its traps, by the UPS's name: so it is known behind "
        "a relay that keeps no address. That of an snmp source is known already, where it has one.",
        examples=[{"rack-a": {"credential": "trap-rack-a"}}],
        json_schema_extra={"x-keys": "a name under ups"},
    )
    users: list[TrapUser] = Field(
        default_factory=list,
        max_length=MAX_USERS,
        description="Users of version 3.",
        examples=[[{"user": "pgtrap", "auth": {"credential": "trap-auth"}}]],
    )
    addresses: dict[UpsName, Annotated[list[str], Field(min_length=1, max_length=MAX_ADDRESSES)]] = Field(
        default_factory=dict,
        description="Further addresses from which a UPS's card sends, by the UPS's name: its second interface, or the "
        "card of a UPS that is read in another way. The `host` of every snmp source is known already.",
        examples=[{"rack-a": ["10.0.1.5"]}],
        json_schema_extra={"x-keys": "a name under ups"},
    )

    @field_validator("addresses")
    @classmethod
    def _all_addresses(cls, addresses: dict[str, list[str]]) -> dict[str, list[str]]:
        for ups, listed in addresses.items():
            for address in listed:
                try:
                    ipaddress.ip_address(address)
                except ValueError:
                    msg = f"{ups}: must be IP addresses, got {address!r} (traps carry no names)"
                    raise ValueError(msg) from None
        return addresses

    @model_validator(mode="after")
    def _one_card_each(self) -> Self:
        owner: dict[str, str] = {}
        for user in self.users:
            for ups, engine in user.engines.items():
                known = owner.setdefault(plain_engine(engine), ups)
                if known != ups:
                    msg = f"engine id {engine} stands under {known} and {ups}; each card has its own"
                    raise ValueError(msg)
        return self

    @property
    def names(self) -> set[str]:
        """Every UPS that is named."""
        return {*self.addresses, *self.communities, *(ups for user in self.users for ups in user.engines)}


def plain_engine(engine: str) -> str:
    """Return an engine id in small letters, without 0x."""
    return engine.lower().removeprefix("0x")
