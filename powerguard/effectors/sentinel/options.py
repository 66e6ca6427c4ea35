"""The settings of the sentinels that may power this host on. Imports nothing heavy."""

import ipaddress
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from powerguard.options import AbsolutePath, Fingerprint, Options, Secret
from powerguard.protocols.sentinel import NAME

_LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_Url = Annotated[
    str,
    Field(
        pattern=r"^https?://[A-Za-z0-9.:\[\]-]{1,253}$",
        json_schema_extra={"x-wanted": "https://ADDRESS:PORT and nothing behind it"},
    ),
]


class SentinelOptions(Options):
    """Sentinels: other hosts that power this one on once utility is back, and only if told to at the commit.

    kind: "http": those under `urls` are told; "none": there is none.
    urls: where they listen; all are told at the same time, and one that has stored it is enough.
    key: the secret that this host alone shares with them, of 32 bytes or more (`openssl rand -hex 32`).
    name: what they call this host; not set: its host name up to the first dot.
    ca: PEM file of who signed their certificates; not set: the system's own.
    fingerprint: SHA-256 of the one certificate that they all have, instead of verifying who signed it.
    plain_http: true permits http:// in `urls`: nobody can forge anything, but whoever listens in reads host, outage
        and feeds.
    valid_for_h: hours after which a sentinel forgets an outage, with an alarm.
    """

    kind: Literal["none", "http"] = Field(default="none", examples=["http"])
    urls: list[_Url] = Field(default_factory=list, max_length=8, examples=[["https://10.0.0.2:13494"]])
    key: Secret | None = Field(default=None, examples=[{"credential": "sentinel"}])
    name: str | None = Field(default=None, pattern=NAME, examples=["node-1"])
    ca: AbsolutePath | None = Field(default=None, examples=["/etc/powerguard/sentinel-ca.pem"])
    fingerprint: Fingerprint | None = Field(default=None, examples=["9f" * 32])
    plain_http: bool = Field(default=False, examples=[True])
    valid_for_h: float = Field(default=72, ge=1, le=720, examples=[72])

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind == "none":
            if self.urls or self.key is not None:
                msg = "kind none tells nobody (write kind: http, or leave urls and key out)"
                raise ValueError(msg)
            return self
        if not self.urls or self.key is None:
            msg = "kind http needs urls and key"
            raise ValueError(msg)
        if len(set(self.urls)) < len(self.urls):
            msg = "urls names the same sentinel twice: one answer of it is no second one"
            raise ValueError(msg)
        for url in self.urls:
            self._check(url)
        if self.ca is not None and self.fingerprint is not None:
            msg = "give ca or fingerprint, not both: a pinned certificate needs nobody to sign it"
            raise ValueError(msg)
        return self

    def _check(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if not host or port is None:
            msg = "each of urls needs an address and a port, such as https://10.0.0.2:13494"
            raise ValueError(msg)
        if parts.scheme == "http" and not self.plain_http and not _is_here(host):
            msg = (
                "http:// hides nothing: whoever listens in reads host, outage and feeds, though nobody can forge them "
                "(write https://, or plain_http: true)"
            )
            raise ValueError(msg)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK
