"""The settings of the BMC. Imports no IPMI library, so that reading the settings stays cheap."""

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from powerguard.options import AbsolutePath, Fingerprint, Options, Secret

IPMI_SOCKET: Final = "/run/powerguard-ipmi/ipmi.sock"
"""Where powerguard-ipmi.socket listens (systemd/powerguard-ipmi.socket)."""

_IPMI_USER_BYTES: Final = 16


class BmcOptions(Options):
    """How the host's own BMC is reached, and what may be done to it.

    kind: the engine. "in-band" asks /dev/ipmi0 through the root helper powerguard-ipmi; "redfish" and "ipmi-lan" go
        over the network; "auto" takes the first of these three that verifies it. "none": there is none, so nobody
        makes sure that the host powers on by itself.
    host: address or name of the BMC on its own network.
    port: UDP port of IPMI over LAN (RMCP+).
    ipmi_library: who speaks IPMI over LAN. "python-ipmi" (IPv4 alone, pip install '.[ipmi]' in a checkout) is for
        BMCs and networks on which "pyghmi" loses its time or fails.
    https_port: TCP port of Redfish.
    user: account of the BMC with privilege level Operator; no more is needed. IPMI has room for 16 characters.
    password: where its password is kept.
    ca: PEM file of who signed the BMC's certificate, for Redfish; not set: the system's own.
    fingerprint: SHA-256 of the BMC's own certificate, for Redfish, instead of verifying who signed it.
    system: which of several systems behind one Redfish service this host is: the last part of its path.
    socket: where the root helper listens; differs from the default in tests and in unusual layouts.
    policy: "ensure" sets the power restore policy to always-on where it is anything else; "bracket" does so only
        when an outage begins, before that makes sure that it could, and puts the other one back when training runs
        again; "observe" only reads it.
    watchdog: also let the BMC's own timer cycle the power after a power-off (layer D), in-band; armed only where a
        drill has shown that it works on this board: `powerguard drill --scope bmc-watchdog`.
    """

    kind: Literal["none", "auto", "in-band", "redfish", "ipmi-lan"] = Field(examples=["auto"])
    host: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:%-]{1,253}$", examples=["10.0.8.21"])
    port: int = Field(default=623, ge=1, le=65535)
    ipmi_library: Literal["pyghmi", "python-ipmi"] = "pyghmi"
    https_port: int = Field(default=443, ge=1, le=65535)
    user: str | None = Field(default=None, min_length=1, max_length=64, examples=["powerguard"])
    password: Secret | None = Field(default=None, examples=[{"credential": "bmc"}])
    ca: AbsolutePath | None = Field(default=None, examples=["/etc/powerguard/bmc-ca.pem"])
    fingerprint: Fingerprint | None = Field(default=None, examples=["9f" * 32])
    system: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]{1,255}$", examples=["1"])
    socket: str = Field(
        default=IPMI_SOCKET,
        pattern=r"^/[^\x00]+$",
        max_length=107,  # sun_path of unix(7) has 108 bytes
        examples=[IPMI_SOCKET],
        json_schema_extra={"x-wanted": "an absolute path of at most 107 characters"},
    )
    policy: Literal["ensure", "bracket", "observe"] = "ensure"
    watchdog: bool = Field(default=False, examples=[True])

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        wanted = ("host", "user", "password")
        if self.kind in {"none", "in-band"}:
            given = [name for name in wanted if getattr(self, name) is not None]
            if given:
                msg = f"kind {self.kind} uses no {given[0]} (write kind: ipmi-lan, or leave {', '.join(given)} out)"
                raise ValueError(msg)
        else:
            missing = [name for name in wanted if getattr(self, name) is None]
            # auto without any of them is in-band alone; with some of them it is a mistake
            if missing and not (self.kind == "auto" and len(missing) == len(wanted)):
                msg = f"kind {self.kind} needs {', '.join(missing)}"
                raise ValueError(msg)
        if self.kind in {"auto", "ipmi-lan"} and len((self.user or "").encode()) > _IPMI_USER_BYTES:
            msg = f"kind {self.kind}: user must be at most {_IPMI_USER_BYTES} bytes, as IPMI has no room for more"
            raise ValueError(msg)
        if self.ipmi_library == "python-ipmi" and ":" in (self.host or ""):
            msg = f"ipmi_library: python-ipmi speaks IPv4 alone, and host is {self.host} (leave ipmi_library out)"
            raise ValueError(msg)
        if self.watchdog and self.kind not in {"in-band", "auto"}:
            msg = f"watchdog is armed in-band, and kind is {self.kind} (write kind: auto, or leave watchdog out)"
            raise ValueError(msg)
        if self.ca is not None and self.fingerprint is not None:
            msg = "give ca or fingerprint, not both: a pinned certificate needs nobody to sign it"
            raise ValueError(msg)
        return self
