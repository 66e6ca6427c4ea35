"""The sentinel's own settings: one file, read as strictly as the daemon's."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from powerguard.effectors.options import BmcOptions
from powerguard.effectors.sentinel.protocol import MAX_FEEDS, MIN_KEY_BYTES, NAME, PORT
from powerguard.options import AbsolutePath, ListenAddress, Options, Secret, SecretError
from powerguard.sentinel.decide import HostRules
from powerguard.settings.explain import dotted
from powerguard.settings.load import Files, SettingsError, validate
from powerguard.settings.schema import LogOptions, Name, SourceOptions
from powerguard.yamlfile import KeyPath, YamlFileError, load_file

MAX_HOSTS: Final = 256
_HTTPS_PORT: Final = 443
_IPMI_PORT: Final = 623
HostName = Annotated[str, Field(pattern=NAME)]


class SentinelUps(Options):
    """One UPS, by the name that the hosts use for it."""

    sources: list[SourceOptions] = Field(
        min_length=1,
        max_length=8,
        description="Its sources, as in powerguard.yaml.",
        examples=[[{"kind": "nut", "host": "10.0.0.9", "name": "rack-a"}]],
    )


class SentinelHost(Options):
    """A host that may be powered on."""

    key: Secret = Field(
        description="The secret that only this host shares with the sentinel, of 32 bytes or more.",
        examples=[{"credential": "node-1"}],
    )
    bmc: BmcOptions = Field(
        description="Its BMC: kind redfish or ipmi-lan; its policy is not used here.",
        examples=[{"kind": "redfish", "host": "10.0.8.21", "user": "sentinel", "password": {"credential": "bmc-1"}}],
    )
    feeds: list[Name] = Field(
        min_length=1,
        max_length=MAX_FEEDS,
        description="UPS of each of its power supplies, by its name under `ups`.",
        examples=[["rack-a", "rack-b"]],
    )
    minimum_supplies: int | None = Field(
        default=None,
        ge=1,
        le=MAX_FEEDS,
        description="Power supplies whose UPS must be good before it is powered on. Not set: all of them.",
        examples=[1],
    )
    stagger_s: float = Field(
        default=10,
        ge=0,
        le=3600,
        description="Seconds from the last host that was powered on to this one: they all draw most when they start.",
        examples=[10],
    )

    @field_validator("bmc")
    @classmethod
    def _over_the_network(cls, bmc: BmcOptions) -> BmcOptions:
        if bmc.kind not in {"redfish", "ipmi-lan"}:
            msg = f"another host's BMC is reached by kind: redfish or ipmi-lan, not {bmc.kind}"
            raise ValueError(msg)
        return bmc

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.minimum_supplies is not None and self.minimum_supplies > len(self.feeds):
            msg = f"minimum_supplies is {self.minimum_supplies}, but there are only {len(self.feeds)} feeds"
            raise ValueError(msg)
        return self

    @property
    def rules(self) -> HostRules:
        """The rules for the decision."""
        least = len(self.feeds) if self.minimum_supplies is None else self.minimum_supplies
        return HostRules(feeds=tuple(self.feeds), minimum_supplies=least, stagger_s=self.stagger_s)


class TlsOptions(Options):
    """How the sentinel proves its identity to hosts."""

    certificate: AbsolutePath = Field(
        description="PEM file of its certificate, and of those that signed it.",
        examples=["/etc/powerguard/sentinel.pem"],
    )
    key: Secret = Field(description="Its private key, in PEM.", examples=[{"credential": "sentinel-tls"}])


class SentinelSettings(Options):
    """Everything that the operator of a sentinel can set."""

    mode: Literal["armed", "dry-run"] = Field(
        description="armed: hosts are powered on. dry-run: orders are only recorded. No default.", examples=["dry-run"]
    )
    listen: ListenAddress = Field(
        default="127.0.0.1",
        description="Address to listen on.",
        examples=["10.0.0.2"],
    )
    port: int = Field(default=PORT, ge=1, le=65535, description="TCP port.", examples=[PORT])
    tls: TlsOptions | None = Field(
        default=None,
        description="Its certificate. Not set: plain HTTP, which plain_http must permit.",
        examples=[{"certificate": "/etc/powerguard/sentinel.pem", "key": {"credential": "sentinel-tls"}}],
    )
    plain_http: bool = Field(
        default=False,
        description="Permit plain HTTP: requests cannot be forged, but a listener can read hosts and outages.",
        examples=[True],
    )
    page_key: Secret | None = Field(
        default=None,
        description="The secret, of 32 bytes or more, that shows names and reasons on the page. Not set: never shown.",
        examples=[{"credential": "sentinel-page"}],
    )
    state: AbsolutePath = Field(
        default="/var/lib/powerguard-sentinel",
        description="Folder in which intents are kept. It must lie on a local disk.",
        examples=["/var/lib/powerguard-sentinel"],
    )
    ups: dict[Name, SentinelUps] = Field(
        min_length=1,
        description="The UPSes, by name.",
        examples=[{"rack-a": {"sources": [{"kind": "nut", "host": "10.0.0.9", "name": "rack-a"}]}}],
        json_schema_extra={"x-keys": "a name of small letters, digits, dots and dashes, such as rack-a"},
    )
    hosts: dict[HostName, SentinelHost] = Field(
        min_length=1,
        max_length=MAX_HOSTS,
        description="The hosts, by their own names, in the order in which they are powered on.",
        examples=[{"node-1": {"feeds": ["rack-a"]}}],
        json_schema_extra={"x-keys": "a host's name, such as node-1"},
    )
    utility_stable_s: float = Field(
        default=60, ge=5, le=7200, description="Seconds that utility must hold first.", examples=[60]
    )
    charge_pct: float = Field(
        default=10,
        ge=0,
        le=95,  # some batteries never report 100
        description="Charge that a UPS must have first, so that a host survives its own start. 0: any charge.",
        examples=[10],
    )
    log: LogOptions = Field(
        default_factory=LogOptions, description="How the log is written.", examples=[{"level": "info"}]
    )

    @model_validator(mode="after")
    def _hidden_or_said(self) -> Self:
        if self.tls is None and not self.plain_http and not ipaddress.ip_address(self.listen).is_loopback:
            msg = (
                "without tls a listener can read hosts and outages, but cannot forge requests "
                "(give it a certificate, or write plain_http: true)"
            )
            raise ValueError(msg)
        if self.page_key is not None and self.tls is None and not ipaddress.ip_address(self.listen).is_loopback:
            msg = "without tls a listener can read page_key (give it a certificate, or leave page_key out)"
            raise ValueError(msg)
        return self


def load(path: Path) -> SentinelSettings:
    """Read the settings. Raises SettingsError with every problem; secrets are not read here."""
    try:
        document = load_file(path)
    except YamlFileError as error:
        raise SettingsError([str(problem) for problem in error.problems]) from None
    if not isinstance(document.data, dict):
        msg = f"{document.name}: must be a map of settings (config/sentinel.yaml is the sample)"
        raise SettingsError([msg])
    # No conf.d: that one is the daemon's.
    settings = validate(SentinelSettings, Files(document.data, (document,), {}), schema=_schema)
    mistakes = [*_unknown_feeds(settings), *_shared_bmcs(settings)]
    if mistakes:
        raise SettingsError([f"{document.where(at)}: {dotted(at)}: {what}" for at, what in mistakes])
    return settings


def _unknown_feeds(settings: SentinelSettings) -> list[tuple[KeyPath, str]]:
    what = f"unknown UPS (known: {', '.join(settings.ups)})"
    return [
        (("hosts", host, "feeds", place), what)
        for host, options in settings.hosts.items()
        for place, feed in enumerate(options.feeds)
        if feed not in settings.ups
    ]


def _shared_bmcs(settings: SentinelSettings) -> list[tuple[KeyPath, str]]:
    """Return the hosts whose BMC is that of an earlier one: powered on would be the wrong one."""
    found: list[tuple[KeyPath, str]] = []
    earlier: dict[str, BmcOptions] = {}
    for host, options in settings.hosts.items():
        owner = next((name for name, bmc in earlier.items() if _is_same_bmc(bmc, options.bmc)), None)
        if owner is not None:
            found.append((("hosts", host, "bmc"), f"this is the BMC of {owner} already; give each host its own"))
        earlier[host] = options.bmc
    return found


def _is_same_bmc(one: BmcOptions, other: BmcOptions) -> bool:
    """Say whether both are one BMC. Ports that are not the usual ones may lead to different BMCs behind a router."""
    if _address(one.host) != _address(other.host):
        return False
    if one.kind != other.kind:
        return all(
            bmc.https_port == _HTTPS_PORT if bmc.kind == "redfish" else bmc.port == _IPMI_PORT for bmc in (one, other)
        )
    if one.kind == "redfish":
        return one.https_port == other.https_port and (one.system == other.system or None in (one.system, other.system))
    return one.port == other.port


def _address(host: str | None) -> str:
    """Return an address or a name in one spelling."""
    try:
        return str(ipaddress.ip_address(host or ""))
    except ValueError:
        return (host or "").lower().removesuffix(".")


def read_keys(settings: SentinelSettings) -> tuple[dict[str, bytes], bytes]:
    """Return the key of each host, and that of the page ("": none).

    Raises SettingsError: one that is missing, short, or that two share.
    """
    problems: list[str] = []
    keys: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    secrets = {f"hosts.{name}.key": host.key for name, host in settings.hosts.items()}
    for where, secret in (secrets | {"page_key": settings.page_key}).items():
        try:
            key = b"" if secret is None else secret.read()
        except SecretError as error:
            problems.append(f"{where}: {error}")
            continue
        if secret is not None and len(key) < MIN_KEY_BYTES:
            problems.append(f"{where}: {len(key)} bytes, at least {MIN_KEY_BYTES} (openssl rand -hex 32)")
        if key in owners:
            problems.append(f"{where}: is also {owners[key]}; give each its own")
        owners[key] = where
        keys[where] = key
    if problems:
        raise SettingsError(problems)
    return {name: keys[f"hosts.{name}.key"] for name in settings.hosts}, keys["page_key"]


def _schema() -> dict[str, Any]:
    return SentinelSettings.model_json_schema()
