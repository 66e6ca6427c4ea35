"""The settings. Each field says what it is, in which unit; a range whose reason is not plain says it.

Lists and maps that hold the settings of one source or effector are made of the classes next to it.

Whether the order that switches a UPS's output off can go the way that the settings name, and by which source.
"""

import contextlib
import functools
import ipaddress
import itertools
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from powerguard.effectors.options import (
    BmcOptions,
    GpuOptions,
    HostOptions,
    OutputOffOptions,
    ResumeOptions,
    RtcOptions,
    SchedulerOptions,
    SentinelOptions,
    SignalsOptions,
)
from powerguard.effectors.trainer.options import AnyTrainerOptions
from powerguard.options import AbsolutePath, ListenAddress, Options, SocketPath, Uid
from powerguard.settings.notify import NotifyOptions
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.nut.options import NutOptions, OutletOptions
from powerguard.ups.snmp.options import SnmpOptions, TrapOptions

Source = SnmpOptions | NutOptions | ApcupsdOptions


class UnfitError(ValueError):
    """An order that the sources cannot carry: a mistake that anything below the UPS may be the reason of."""


def sender(sources: Sequence[Source], wanted: OutputOffOptions) -> SnmpOptions | NutOptions | None:
    """Return the source that the order goes through; None where none is named, or more than one."""
    found = [
        each
        for each in sources
        if isinstance(each, SnmpOptions | NutOptions) and each.kind == wanted.by and wanted.host in {None, each.host}
    ]
    return found[0] if len(found) == 1 else None


def unfit(sources: Sequence[Source], wanted: OutputOffOptions) -> str:
    """Return the error with its fix; "" if there is none."""
    source = sender(sources, wanted)
    if source is None:
        at = "" if wanted.host is None else f" at {wanted.host}"
        return f"output_off.by: {wanted.by}{at} matches no source of this UPS, or several (set output_off.host)"
    if isinstance(source, NutOptions):
        if source.user is None:
            return "output_off.by: nut needs user and password in that source (with instcmds in upsd.users)"
        is_protected = source.tls == "required" or _is_here(source.host)
        right = "tls: required"
    else:
        if wanted.community is not None and source.version == 3:
            return "output_off.community is for versions 1 and 2c: with version 3, permit its user to write"
        is_protected = source.version == 3 and source.auth is not None and source.priv is not None
        right = "version: 3 with auth and priv"
    if is_protected or wanted.dedicated_network:
        return ""
    return f"output_off could be forged or overheard on its way: set {right}, or dedicated_network: true"


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in {"localhost", "localhost.localdomain", "ip6-localhost"}


SourceOptions = Annotated[SnmpOptions | NutOptions | ApcupsdOptions, Field(discriminator="kind")]
"""The options of any source, distinguished by `kind`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")]
LoadPct = Annotated[float, Field(gt=0, le=150)]
RuntimeS = Annotated[float, Field(ge=10, le=172800)]
"""10 s to 48 h: a shorter one is useless, a longer one is a decimal point in the wrong place."""

MAX_TRAINERS: Final = 64
_SHORTEST_H: Final = 0.02
_LONGEST_H: Final = 24.0
"""Nameplate energy over rating: UPSes have 0.08 to some hours; beyond these bounds a unit is wrong."""


def falls_with_load(table: dict[float, float]) -> dict[float, float]:
    """Return the table. A battery never lasts longer at a higher load: two numbers were swapped. Raises ValueError."""
    for (low, long_s), (high, short_s) in itertools.pairwise(sorted(table.items())):
        if short_s >= long_s:
            msg = (
                f"must fall as the load rises, got {long_s:g} s at {low:g} % and {short_s:g} s at {high:g} % "
                "(write load in percent: seconds)"
            )
            raise ValueError(msg)
    return table


class SharedOptions(Options):
    """Other hosts that hang on the same UPS: only this host's own part of its load falls when training pauses."""

    hosts: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Number of hosts on this UPS, this one included. Their loads are taken as equal if nothing better "
        "is known of this host's own.",
        examples=[8],
    )
    own_w: float | None = Field(
        default=None,
        ge=50,
        le=200_000,
        description="Watts that this host draws in training. Used while neither its BMC nor its GPUs measure it.",
        examples=[3000],
    )
    outlets: list[OutletOptions] = Field(
        default=[],
        max_length=8,
        description="Outlets of rack PDUs that measure what this host draws from this UPS: used where no BMC does.",
        examples=[[{"kind": "nut", "host": "10.0.0.9", "name": "pdu-a", "outlets": [3, 4]}]],
    )
    longest_stop_s: float | None = Field(
        default=None,
        ge=5,
        le=3600,
        description="Longest `host.force_after_s` of all hosts on this UPS: an ordered output-off waits for it, and "
        "it is the default step between shed tiers. Not set: that of this host.",
        examples=[110],
    )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.hosts is None and self.own_w is None:
            msg = "shared needs hosts, own_w or both (example: shared: {hosts: 8})"
            raise ValueError(msg)
        return self


class ShedOptions(Options):
    """How important this host is among those on its UPS. Lower tiers pause and power off earlier."""

    tier: int = Field(ge=0, le=9, description="Tier of this host; a higher one is kept longer.", examples=[1])
    highest: int = Field(
        default=2,
        ge=0,
        le=9,
        description="Highest tier that is in use on this UPS. The hosts of this tier give up nothing.",
        examples=[2],
    )
    extra_reserve_s: float | None = Field(
        default=None,
        ge=0,
        le=7200,
        description="Seconds of effective runtime by which this host pauses and powers off earlier. Not set: one stop "
        "for each tier above this one; `powerguard plan` shows it.",
        examples=[120],
    )

    @model_validator(mode="after")
    def _is_a_tier(self) -> Self:
        if self.tier > self.highest:
            msg = f"tier {self.tier} is above highest, {self.highest} (set highest to the highest tier on this UPS)"
            raise ValueError(msg)
        return self


class UpsOptions(Options):
    """One UPS: how it is read, and what its data sheet says."""

    sources: list[SourceOptions] = Field(
        min_length=1,
        max_length=8,
        description="How this UPS is read. Several sources confirm each other; in each field the more cautious "
        "value counts.",
        examples=[[{"kind": "snmp", "host": "10.0.0.5", "version": "2c"}]],
    )
    runtime_table: dict[LoadPct, RuntimeS] | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        description="Runtime of a new, full battery: load in percent of the rating, and seconds; from the data "
        "sheet. If it is not set, powerguard trusts the runtime that the UPS reports, and doctor warns.",
        examples=[{50: 540, 75: 360, 100: 240}],
        json_schema_extra={"x-keys": "a load in percent of the rating, above 0, at most 150"},
    )
    rating_w: float | None = Field(
        default=None,
        ge=100,  # below stands a VA figure of a desk UPS in kVA, or a typing error
        le=2_000_000,
        description="Rated output in watts (not VA). Needed if the UPS reports its load in watts but not in percent.",
        examples=[5400],
    )
    battery_wh: float | None = Field(
        default=None,
        ge=10,  # less is a button cell, or kWh
        le=20_000_000,
        description="Energy of the battery as printed on it: volts x ampere-hours of all batteries, external packs "
        "included. With rating_w it makes a cautious estimate of an unknown runtime_table.",
        examples=[2000],
    )
    battery_installed: str | None = Field(
        default=None,
        pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])$",
        description="Year and month in which the battery was installed. If it is older than 3 years, powerguard "
        "assumes a lower health.",
        examples=["2025-03"],
        json_schema_extra={"x-wanted": "year and month, such as '2025-03'"},
    )
    output_off_after_s: float = Field(
        default=0,
        ge=0,
        le=600,  # a UPS delay of more than 10 minutes is no part of a stop
        description="Seconds of a UPS countdown that run after the forced power-off: about 30 if the UPS switches "
        "its output off, 0 if the output stays on.",
        examples=[30],
    )
    forced_shutdown_delay_s: float = Field(
        default=25,
        ge=0,
        le=600,
        description="Seconds from a forced shutdown (NUT FSD) to output off: HOSTSYNC, FINALDELAY and the UPS's delay.",
        examples=[25],
    )
    output_off: OutputOffOptions | None = Field(
        default=None,
        description="This host, and no other, orders this UPS to switch its output off after the shutdown and on "
        "again with utility (docs/guides/return.md). Not set: this host does not order it.",
        examples=[{"by": "snmp"}],
    )

    shared: SharedOptions | None = Field(
        default=None,
        description="Other hosts hang on this UPS (docs/guides/several-ups.md). Not set: this host has it to itself.",
        examples=[{"hosts": 8}],
    )

    @field_validator("runtime_table")
    @classmethod
    def _falls(cls, table: dict[float, float] | None) -> dict[float, float] | None:
        return table if table is None else falls_with_load(table)

    @model_validator(mode="after")
    def _output_can_be_ordered(self) -> Self:
        mistake = "" if self.output_off is None else unfit(self.sources, self.output_off)
        if mistake:
            raise UnfitError(mistake)
        return self

    @model_validator(mode="after")
    def _own_watts_need_a_rating(self) -> Self:
        if self.shared is not None and self.shared.hosts is None and self.rating_w is None:
            msg = "shared.own_w says nothing without rating_w (set the rated watts, or shared.hosts)"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _energy_needs_a_rating(self) -> Self:
        if self.battery_wh is not None and self.runtime_table is None and self.rating_w is None:
            msg = "battery_wh needs rating_w (set the rated watts, or a runtime_table)"
            raise ValueError(msg)
        if self.battery_wh is not None and self.runtime_table is None and self.rating_w is not None:
            hours = self.battery_wh / self.rating_w
            if not _SHORTEST_H <= hours <= _LONGEST_H:
                msg = (
                    f"battery_wh {self.battery_wh:g} and rating_w {self.rating_w:g} do not go together: that is "
                    f"{60 * hours:.1f} minutes at full load (write watt-hours and watts)"
                )
                raise ValueError(msg)
        return self


class FeedsOptions(Options):
    """Which UPSes feed this host, and how many of its power supplies must live."""

    supplies: list[Name] = Field(
        min_length=1,
        max_length=16,
        description="UPS of each power supply, by its name under `ups`.",
        examples=[["rack-a", "rack-b"]],
    )
    minimum_supplies: int = Field(
        default=1, ge=1, le=16, description="Power supplies that must have power for the host to run.", examples=[1]
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.minimum_supplies > len(self.supplies):
            msg = f"minimum_supplies is {self.minimum_supplies}, but there are only {len(self.supplies)} supplies"
            raise ValueError(msg)
        return self


class BudgetOptions(Options):
    """How careful the sums are. The defaults suit a host whose UPS was not measured."""

    reserve_s: float = Field(
        default=60,
        ge=0,
        le=1800,  # more than half an hour of reserve is no reserve but another battery
        description="Seconds kept in reserve after the power-off.",
        examples=[60],
    )
    margin: float = Field(
        default=0.2,
        ge=0,
        le=0.9,  # what is left must be worth planning with
        description="Share of the remaining energy that is not planned with.",
        examples=[0.2],
    )
    low_battery_s: float = Field(
        default=120,
        ge=20,  # the shortest delay that UPS makers ship is 2 minutes; below 20 s no host stops
        le=1800,
        description="Seconds that a battery lasts once the UPS says it is low (its low-battery setting).",
        examples=[120],
    )
    health: float | None = Field(
        default=None,
        ge=0.2,
        le=1.0,
        description="Share of a new battery's energy that this one still holds. Not set: 0.75, and 0.6 when it is "
        "older than 3 years.",
        examples=[0.75],
    )
    blind_s: float = Field(
        default=120,
        ge=20,
        le=3600,
        description="Seconds on battery after which the host is powered off if neither a runtime nor a "
        "runtime_table is known.",
        examples=[120],
    )
    stop_q95_s: float | None = Field(
        default=None,
        ge=1,
        le=3600,
        description="Seconds within which 19 of 20 stops of this host end. Not set: `host.force_after_s`, or the "
        "measured time if that is less.",
        examples=[80],
    )
    stop_median_s: float | None = Field(
        default=None,
        ge=1,
        le=3600,
        description="Seconds that this host usually needs to stop. Not set: 45, or stop_q95_s if that is less.",
        examples=[45],
    )
    bare_stop_s: float = Field(
        default=10,
        ge=1,
        le=120,
        description="Seconds from a forced power-off until the host draws no power.",
        examples=[10],
    )
    paused_load: float | None = Field(
        default=None,
        ge=0.1,
        le=1.0,  # a host that draws less than a tenth when paused was never measured
        description="Load of the UPS once this host's training is paused, as a share of the load before. Used until "
        "a drill or an outage has measured it. Not set: computed from what the GPUs draw (`gpu.kind: nvml`), else 0.6.",
        examples=[0.6],
    )
    recharge_h: float = Field(
        default=8,
        ge=0.01,  # supercapacitors charge in less than a minute
        le=72,
        description="Hours that the UPS needs to charge an empty battery.",
        examples=[8],
    )
    utility_stable_s: float = Field(
        default=10,
        ge=2,  # two readings at least
        le=600,
        description="Seconds that utility must be stable before training continues.",
        examples=[10],
    )
    resume_charge_pct: float = Field(
        default=40,
        ge=0,
        le=95,  # some batteries never report 100
        description="Charge that must be reached after a power-off before training starts: enough for a second outage.",
        examples=[40],
    )
    unknown_hold_s: float = Field(
        default=600,
        ge=0,
        le=7200,
        description="Seconds that training waits after boot if the UPS does not answer.",
        examples=[600],
    )
    charge_hold_s: float = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds of utility after a return, after which training starts even if the charge is too low "
        "for a second outage. Waiting longer would not protect the host, which is up already.",
        examples=[60],
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.stop_q95_s is not None and self.stop_median_s is not None and self.stop_median_s > self.stop_q95_s:
            msg = f"stop_median_s ({self.stop_median_s:g}) must not be more than stop_q95_s ({self.stop_q95_s:g})"
            raise ValueError(msg)
        return self


class HttpOptions(Options):
    """The read-only port: metrics, health, status, plan."""

    listen: ListenAddress = Field(
        default="127.0.0.1",
        description="Address to listen on. There is no login: every client that reaches it can read.",
        examples=["127.0.0.1"],
    )
    port: int = Field(default=13493, ge=1, le=65535, description="TCP port.", examples=[13493])


class ControlOptions(Options):
    """The unix socket for requests that make a change."""

    socket: SocketPath = Field(
        default="/run/powerguard/powerguard.sock",
        description="Its path.",
        examples=["/run/powerguard/powerguard.sock"],
    )
    group: str = Field(
        default="powerguard-admin",
        pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,31}$",
        description="Members of this group, and root, may use it. The daemon's user must be in it, too.",
        examples=["powerguard-admin"],
    )


class JournalOptions(Options):
    """What survives a power cut: state, orders, outages."""

    path: AbsolutePath = Field(
        default="/var/lib/powerguard/journal.sqlite",
        description="The file. It must lie on a local disk.",
        examples=["/var/lib/powerguard/journal.sqlite"],
    )
    keep_outages: int = Field(
        default=200,
        ge=10,  # learned times need a history
        le=10_000,  # so that the journal stays below some 100 MB
        description="Number of outages that are kept; the oldest are removed first.",
        examples=[200],
    )


class LogOptions(Options):
    """The log."""

    format: Literal["auto", "journald", "logfmt", "json"] = Field(
        default="auto",
        description="auto: journald under systemd, else logfmt (key=value, times in UTC).",
        examples=["auto"],
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged.", examples=["info"]
    )


class Settings(Options):
    """Everything that the operator can set."""

    mode: Literal["armed", "rehearse", "dry-run"] = Field(
        description="armed: powerguard powers this host off. rehearse: it does everything else, and only records the "
        "power-off, power-on methods and the end of jobs. dry-run: it only records what it would do. No default.",
        examples=["dry-run"],
    )
    ups: dict[Name, UpsOptions] = Field(
        min_length=1,
        max_length=64,
        description="The UPSes, by name.",
        examples=[{"rack-a": {"sources": [{"kind": "snmp", "host": "10.0.0.5"}]}}],
        json_schema_extra={"x-keys": "a name of small letters, digits, dots and dashes, such as rack-a"},
    )
    feeds: FeedsOptions | None = Field(
        default=None,
        description="Which UPS feeds this host. Not set: the one under `ups`.",
        examples=[{"supplies": ["rack-a"], "minimum_supplies": 1}],
    )
    network_witness: bool = Field(
        default=False,
        description="A UPS that falls silent within 30 s of this host's own link or gateway is presumed to be on "
        "battery: only for sites whose switches have no UPS; a switch that fails alone then ends in a "
        "power-off.",
        examples=[True],
    )
    traps: TrapOptions | None = Field(
        default=None,
        description="The port for SNMP traps and informs. Not set: none is open.",
        examples=[{"listen": "10.0.0.20", "port": 1162}],
    )
    trainers: list[AnyTrainerOptions] = Field(
        default_factory=list,
        max_length=MAX_TRAINERS,
        description="The training jobs of this host that are known beforehand.",
        examples=[[{"name": "llm", "url": "unix:/run/powerguard-trainers/llm.sock"}]],
    )
    trainer_sockets: AbsolutePath | None = Field(
        default="/run/powerguard-trainers",
        description="Folder in which trainers put their sockets to be found; null: none.",
        examples=["/run/powerguard-trainers"],
    )
    trainer_uids: list[Uid] = Field(
        default_factory=list,
        max_length=MAX_TRAINERS,
        description="Users whose sockets in trainer_sockets are accepted, by name or number, in addition to root "
        "and the daemon's user.",
        examples=[["train"]],
    )
    checkpoint_dirs: list[AbsolutePath] = Field(
        default_factory=list,
        max_length=MAX_TRAINERS,
        description="Folders of checkpoints: their file systems are synced before each power-off.",
        examples=[["/data/checkpoints"]],
    )
    budget: BudgetOptions = Field(
        default_factory=BudgetOptions, description="The calculation of runtime and needs.", examples=[{"margin": 0.2}]
    )
    shed: ShedOptions | None = Field(
        default=None,
        description="Order in which the hosts of a shared UPS make room for each other. Not set: no host before "
        "another.",
        examples=[{"tier": 1}],
    )
    host: HostOptions = Field(
        default_factory=HostOptions, description="How this host is powered off.", examples=[{"kind": "systemd"}]
    )
    bmc: BmcOptions = Field(
        default_factory=lambda: BmcOptions(kind="none"),
        description="The BMC that must power this host on again. Not set: none, with the alarm no_bmc; {kind: none} "
        "ends it.",
        examples=[{"kind": "auto"}],
    )
    rtc: RtcOptions = Field(
        default_factory=RtcOptions,
        description="The clock whose wake alarm powers this host on if no other method does. Not set: not used.",
        examples=[{"kind": "device"}],
    )
    sentinel: SentinelOptions = Field(
        default_factory=SentinelOptions,
        description="Sentinels on other hosts that power this one on if no other method does. Not set: none.",
        examples=[{"kind": "none"}],
    )
    gpu: GpuOptions = Field(
        default_factory=GpuOptions,
        description="Power limits of GPUs on battery. Not set: unchanged.",
        examples=[{"kind": "nvml"}],
    )
    signals: SignalsOptions = Field(
        default_factory=SignalsOptions,
        description="Signals to trainers that still draw power after they were asked to pause. Not set: none.",
        examples=[{"kind": "helper"}],
    )
    scheduler: SchedulerOptions = Field(
        default_factory=SchedulerOptions,
        description="The scheduler that starts jobs on this host. Not set: none.",
        examples=[{"kind": "slurm"}],
    )
    resume: ResumeOptions = Field(
        default_factory=ResumeOptions,
        description="What starts training after a power-off.",
        examples=[{"target": "powerguard-resume.target"}],
    )
    notify: NotifyOptions = Field(
        default_factory=NotifyOptions,
        description="Messages to people about outages and alarms. Not set: none.",
        examples=[{"targets": {"ops": {"kind": "alertmanager", "url": "http://10.0.0.4:9093"}}}],
    )
    http: HttpOptions = Field(
        default_factory=HttpOptions,
        description="The read-only port.",
        examples=[{"listen": "127.0.0.1", "port": 13493}],
    )
    control: ControlOptions = Field(
        default_factory=ControlOptions,
        description="The socket for commands.",
        examples=[{"group": "powerguard-admin"}],
    )
    journal: JournalOptions = Field(
        default_factory=JournalOptions, description="Place and size of the journal.", examples=[{"keep_outages": 200}]
    )
    log: LogOptions = Field(
        default_factory=LogOptions, description="How the log is written.", examples=[{"level": "info"}]
    )

    @property
    def feeding(self) -> dict[str, int]:
        """Names of the UPSes that feed this host, and how many of its power supplies each carries."""
        supplies = [next(iter(self.ups))] if self.feeds is None else self.feeds.supplies
        return {name: supplies.count(name) for name in supplies}

    @property
    def outlets(self) -> list[OutletOptions]:
        """Outlets of rack PDUs that measure what this host draws, of all its UPSes."""
        shared = (self.ups[name].shared for name in self.feeding)
        return [outlets for each in shared if each is not None for outlets in each.outlets]

    @property
    def feed(self) -> str:
        """Name of the UPS that feeds this host, or of the first of several."""
        return next(iter(self.feeding))


@functools.cache
def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings (draft 2020-12), for editors and for our own messages: 0.1 s to make."""
    schema = Settings.model_json_schema()
    for definition in (schema, *schema["$defs"].values()):
        _describe(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "powerguard settings",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _describe(definition: dict[str, Any]) -> None:
    """Move the field descriptions of a class ("name: text" lines of its docstring) to the fields."""
    summary, _, rest = str(definition.get("description", "")).partition("\n")
    for name, text in re.findall(r"^(\w+): (.*(?:\n[ ]{4}.*)*)", rest, flags=re.MULTILINE):
        field = definition.get("properties", {}).get(name)
        if field is not None:
            field.setdefault("description", " ".join(text.split()))
    if "kind" in definition.get("properties", {}):
        definition["properties"]["kind"].setdefault("description", "Which kind it is.")
    if summary:
        definition["description"] = summary
