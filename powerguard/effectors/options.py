"""The settings of the effectors. They import no library of any peer, so that reading the settings stays cheap."""

import ipaddress
import re
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from powerguard.core.scheduler import MOST_SPREAD_S
from powerguard.effectors.sentinel.protocol import NAME
from powerguard.options import AbsolutePath, Fingerprint, Options, Secret, SocketPath

OFF_FIFO: Final = "/run/powerguard-off/word"
"""Where powerguard-off.socket listens (systemd/powerguard-off.socket)."""


class HostOptions(Options):
    """How the host is powered off.

    kind: systemd: the root helper powerguard-off powers the host off. command: a program of yours does.
    force_after_s: seconds from the order until everything that still runs is killed and the power is cut, within 2
        seconds more. Longer than a usual stop of this host, and 30 s shorter than what the UPS gives.
    command: for kind command only. `{deadline_s}` is replaced by the whole seconds that are left. The program must
        not wait for the end of the shutdown.
    fifo: for kind systemd only.
    late_reboot: for kind systemd only. true: if utility is stable again when all units have stopped, the power-off
        ends in a reboot, because AC never dropped and no BMC would power the host on. false: the host stays off.
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
    """How training is started after a return from power-off, once power and battery allow it.

    by: host: powerguard starts training. scheduler: the scheduler starts the jobs that were requeued, and powerguard
        waits until a trainer reports a step.
    target: a systemd unit that is started; the polkit rule that comes with powerguard allows the default one.
    command: program that is run instead of the target. Empty: the target is started.
    gpus: as-before: training waits for a person if a GPU is missing or needs a reset after a return. any: training
        starts with the GPUs that are there.
    verify: how the newest checkpoint is checked before training starts. manifest: names and sizes; training verifies
        every byte when it loads it. full: every byte, for at most 20 seconds.
    after_unseen_stop: whether training is started at boot if the host had gone down unasked and outside an outage: it
        lost power without a warning, or it crashed. start: unless the BMC reports a reset. if-confirmed: only if the
        BMC reports a loss of AC. never: a person starts it.
    whole_within_s: a job on several hosts that ended because another host left it must train again within this time;
        later powerguard raises an alarm.
    """

    by: Literal["host", "scheduler"] = Field(default="host", examples=["scheduler"])
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
    after_unseen_stop: Literal["start", "if-confirmed", "never"] = Field(default="start", examples=["if-confirmed"])
    whole_within_s: float = Field(default=900.0, ge=30.0, le=86400.0, examples=[900])

    @property
    def starts(self) -> tuple[str | None, list[str]]:
        """The unit that powerguard starts, or the command that it runs instead. With a scheduler, neither."""
        if self.by == "scheduler":
            return None, []
        return (None, self.command) if self.command else (self.target, [])


IPMI_SOCKET: Final = "/run/powerguard-ipmi/ipmi.sock"
"""Where powerguard-ipmi.socket listens (systemd/powerguard-ipmi.socket)."""

_IPMI_USER_BYTES: Final = 16
_NAME_OF_HOST: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


class BmcOptions(Options):
    """How the host's own BMC is reached, and what may be done to it.

    kind: how the BMC is reached. "in-band" asks /dev/ipmi0 through the root helper powerguard-ipmi; "redfish" and
        "ipmi-lan" use the network; "auto" uses the first of these three that reads the policy back. "none": no BMC,
        so no policy makes the host power on by itself.
    host: address or name of the BMC on its own network.
    port: UDP port of IPMI over LAN (RMCP+).
    https_port: TCP port of Redfish.
    user: account of the BMC with privilege level Operator; no more is needed. IPMI has room for 16 characters.
    password: where its password is kept.
    ca: PEM file of the authority that signed the BMC's certificate, for Redfish. Not set: the system's authorities.
    fingerprint: SHA-256 of the BMC's own certificate, for Redfish, instead of a check of its authority.
    system: this host's system, if one Redfish service has several: the last part of its path.
    socket: where the root helper listens.
    policy: "ensure" always keeps the power restore policy at always-on. "bracket" sets it when an outage begins,
        checks beforehand that this is possible, and restores the other policy when training runs again. "observe"
        only reads it.
    watchdog: true: the BMC's watchdog timer cycles the power after a power-off (power-on method D, in-band). It is
        armed only after a drill has shown that it works on this board: `powerguard drill --scope bmc-watchdog`.
    """

    kind: Literal["none", "auto", "in-band", "redfish", "ipmi-lan"] = Field(examples=["auto"])
    host: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:%-]{1,253}$", examples=["10.0.8.21"])
    port: int = Field(default=623, ge=1, le=65535)
    https_port: int = Field(default=443, ge=1, le=65535)
    user: str | None = Field(default=None, min_length=1, max_length=64, examples=["powerguard"])
    password: Secret | None = Field(default=None, examples=[{"credential": "bmc"}])
    ca: AbsolutePath | None = Field(default=None, examples=["/etc/powerguard/bmc-ca.pem"])
    fingerprint: Fingerprint | None = Field(default=None, examples=["9f" * 32])
    system: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]{1,255}$", examples=["1"])
    socket: SocketPath = Field(default=IPMI_SOCKET, examples=[IPMI_SOCKET])
    policy: Literal["ensure", "bracket", "observe"] = "ensure"
    watchdog: bool = Field(default=False, examples=[True])

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        """Refuse what no resolver takes: a port in the host, and an empty label as in 10.0.8..21."""
        if host is not None and not _NAME_OF_HOST.fullmatch(host):
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                msg = "must be an address or a name, such as 10.0.8.21; a port goes into port or https_port"
                raise ValueError(msg) from None
        return host

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        wanted = ("host", "user", "password")
        if self.kind in {"none", "in-band"}:
            given = [name for name in wanted if getattr(self, name) is not None]
            if given:
                msg = f"kind {self.kind} does not use {given[0]} (write kind: ipmi-lan, or remove {', '.join(given)})"
                raise ValueError(msg)
        else:
            missing = [name for name in wanted if getattr(self, name) is None]
            # auto without any of them is in-band alone; with some of them it is a mistake
            if missing and not (self.kind == "auto" and len(missing) == len(wanted)):
                msg = f"kind {self.kind} needs {', '.join(missing)}"
                raise ValueError(msg)
        if self.kind in {"auto", "ipmi-lan"} and len((self.user or "").encode()) > _IPMI_USER_BYTES:
            msg = f"kind {self.kind}: user must be at most {_IPMI_USER_BYTES} bytes, the limit of IPMI"
            raise ValueError(msg)
        if self.watchdog and self.kind not in {"in-band", "auto"}:
            msg = f"watchdog is armed in-band, but kind is {self.kind} (write kind: auto, or remove watchdog)"
            raise ValueError(msg)
        if self.ca is not None and self.fingerprint is not None:
            msg = "give ca or fingerprint, not both: a pinned certificate needs no authority"
            raise ValueError(msg)
        return self


class OutputOffOptions(Options):
    """Power-on method B: the one host with this setting orders the UPS's output off, for all hosts on it."""

    by: Literal["snmp", "nut"] = Field(
        description="The source of this UPS that the order goes through: its card (SETs), or upsd (shutdown.return).",
        examples=["snmp"],
    )
    host: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="`host` of that source, if the UPS has several of this kind.",
        examples=["10.0.0.5"],
    )
    control: Literal["off_with_return", "reboot", "outlet_off_with_return", "outlet_reboot"] = Field(
        default="off_with_return",
        description="Command that is sent, by its name in the UPS's profile (docs/guides/return.md). Use an "
        "outlet's command only if that outlet alone feeds this host. Not for nut, which has shutdown.return.",
    )
    outlet: str | None = Field(
        default=None,
        pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$",
        description="Index of the outlet or outlet group, for the controls of one.",
        examples=["1"],
        json_schema_extra={"x-wanted": "a table index, such as '1' or '1.2'"},
    )
    community: Secret | None = Field(
        default=None, description="Community that may write, with SNMP 1 and 2c; the source's own when not set."
    )
    dedicated_network: bool = Field(
        default=False,
        description="true: the order travels over a network that no other machine can reach. Needed unless the "
        "order is protected: SNMP version 3 with `auth` and `priv`, or upsd on this host or with tls: "
        "required.",
    )
    return_after_s: float = Field(
        default=30,
        ge=5,  # power supplies hold a host up for less, and a BMC must see its AC gone
        le=600,
        description="Seconds from output off, or from utility's return, to output on; rounded up as the UPS needs it.",
        examples=[30],
    )
    returns: Literal["cycles", "aborts", "stays_off"] | None = Field(
        default=None,
        description="What this UPS does if utility returns during its countdown, as you have tried it. Not set: as "
        "its profile says; unknown for nut.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        of_outlet = self.control.startswith("outlet_")
        if of_outlet and self.outlet is None:
            msg = f"control {self.control} needs outlet"
            raise ValueError(msg)
        if self.outlet is not None and not of_outlet:
            msg = f"outlet belongs to outlet_off_with_return and outlet_reboot, and control is {self.control}"
            raise ValueError(msg)
        if self.by == "nut" and (self.control != "off_with_return" or self.community is not None):
            named = "community" if self.community is not None else "control"
            msg = f"{named} belongs to by: snmp; nut has shutdown.return and the source's own user"
            raise ValueError(msg)
        return self


_LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_Url = Annotated[
    str,
    Field(
        pattern=r"^https?://[A-Za-z0-9.:\[\]-]{1,253}$",
        json_schema_extra={"x-wanted": "https://ADDRESS:PORT without a path"},
    ),
]


class SentinelOptions(Options):
    """Sentinels: other hosts that power this one on once utility is back, if this host asked for it at the commit.

    kind: "http": the sentinels under `urls` are informed. "none": there is no sentinel.
    urls: addresses of the sentinels. All are informed at the same time; one that has stored the intent is enough.
    key: the secret that this host alone shares with them, of 32 bytes or more (`openssl rand -hex 32`).
    name: name of this host in the sentinel's settings. Not set: the host name up to the first dot.
    ca: PEM file of the authority that signed their certificates. Not set: the system's authorities.
    fingerprint: SHA-256 of the certificate that all of them use, instead of a check of its authority.
    plain_http: true permits http:// in `urls`. Requests are signed and cannot be forged, but a listener can read
        host, outage and feeds.
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
                msg = "kind none has no sentinel (write kind: http, or remove urls and key)"
                raise ValueError(msg)
            return self
        if not self.urls or self.key is None:
            msg = "kind http needs urls and key"
            raise ValueError(msg)
        if len(set(self.urls)) < len(self.urls):
            msg = "urls names the same sentinel twice: remove one"
            raise ValueError(msg)
        for url in self.urls:
            self._check(url)
        if self.ca is not None and self.fingerprint is not None:
            msg = "give ca or fingerprint, not both: a pinned certificate needs no authority"
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
                "http:// is not encrypted: a listener can read host, outage and feeds, but cannot forge requests "
                "(write https://, or plain_http: true)"
            )
            raise ValueError(msg)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK


GPU_SOCKET: Final = "/run/powerguard-gpu/gpu.sock"
"""Where powerguard-gpu.socket listens (systemd/powerguard-gpu.socket)."""


class GpuOptions(Options):
    """Whether GPUs are slowed down on battery, so that it lasts longer.

    kind: none: limits are unchanged. nvml: the root helper powerguard-gpu lowers the power limits of NVIDIA GPUs.
    cap_share: limit on battery as a share of the limit found, never below the GPU's minimum. Before a drill has
        measured that it pays, it is used only if the load does not fall after a pause.
    socket: where the helper listens.
    """

    kind: Literal["none", "nvml"] = Field(default="none", examples=["nvml"])
    cap_share: float = Field(
        default=0.6,
        ge=0.2,  # no GPU can be set lower
        le=0.95,  # above it is not worth a root helper
        examples=[0.6],
    )
    socket: SocketPath = Field(default=GPU_SOCKET, examples=[GPU_SOCKET])


SLURM_SOCKET: Final = "/run/powerguard-slurm/slurm.sock"
"""Where powerguard-slurm.socket listens (systemd/powerguard-slurm.socket)."""


class SchedulerOptions(Options):
    """Whether the scheduler hears of an outage, and starts training again after it.

    kind: none: no scheduler. slurm: the root helper powerguard-slurm drains this host's node on battery, requeues its
        jobs at the commit, and gives the node back when the host may train again.
    node: this host's NodeName in slurm.conf; "": the host name.
    hold: jobs are requeued in hold, and released when the host is back; else Slurm may start them elsewhere at once.
    spread_s: hosts on one feed drain their nodes within this time, each at a moment of its own.
    socket: where the helper listens.
    """

    kind: Literal["none", "slurm"] = Field(default="none", examples=["slurm"])
    node: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$", examples=["gpu1"])
    hold: bool = Field(default=False, examples=[True])
    spread_s: float = Field(default=0.5, ge=0.0, le=MOST_SPREAD_S, examples=[6.0])
    socket: SocketPath = Field(default=SLURM_SOCKET, examples=[SLURM_SOCKET])


SIGNAL_SOCKET: Final = "/run/powerguard-signal/signal.sock"
"""Where powerguard-signal.socket listens (systemd/powerguard-signal.socket)."""


class SignalsOptions(Options):
    """Whether trainers are signalled that still draw power although they were asked to pause.

    kind: none: no trainer is signalled. helper: the root helper powerguard-signal stops, and finally ends, trainers
        that still draw power. It finds a process by its socket in /run/powerguard-trainers.
    socket: where the helper listens.
    """

    kind: Literal["none", "helper"] = Field(default="none", examples=["helper"])
    socket: SocketPath = Field(default=SIGNAL_SOCKET, examples=[SIGNAL_SOCKET])


RTC_DEVICE: Final = "/dev/rtc0"


class RtcOptions(Options):
    """The host's own clock, whose alarm can power it on if no other method does (docs/guides/return.md).

    kind: none: the clock is not used. device: its wake alarm is set for an outage, and disarmed afterwards.
    device: the clock; systemd/powerguard.rtc.rules gives rtc0 to the daemon's group.
    """

    kind: Literal["none", "device"] = Field(default="none", examples=["device"])
    device: AbsolutePath = Field(default=RTC_DEVICE, examples=[RTC_DEVICE])
