"""The site file: every number of the simulated world, with the defaults that the published figures use.

YAML as the settings (docs/reference/simulate.md shows one). A share is 0 to 1; a pair is [least, most].
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from powerguard.options import Options
from powerguard.settings.load import Files, SettingsError, validate
from powerguard.settings.schema import falls_with_load
from powerguard.yamlfile import YamlFileError, load_file

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0, le=1e7)]


MOST_HOSTS = 100
"""Most hosts of a simulated rack."""


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        msg = f"must be [least, most], got [{pair[0]:g}, {pair[1]:g}]"
        raise ValueError(msg)
    return pair


Shares = Annotated[tuple[Share, Share], AfterValidator(_in_order)]
Parts = Annotated[tuple[Annotated[float, Field(gt=0.0, le=1.0)], Share], AfterValidator(_in_order)]
"""Shares of something that is there."""
Span = Annotated[tuple[Seconds, Seconds], AfterValidator(_in_order)]


class Bin(Options):
    """A share of all outages lasts between from_s and to_s."""

    from_s: float = Field(gt=0.0, le=1e7, description="Shortest.")
    to_s: float = Field(gt=0.0, le=1e7, description="Longest.")
    share: float = Field(ge=0.0, le=1.0, description="Share of all outages; the shares of all bins are scaled to 1.")


class OutageSite(Options):
    """How long utility is gone, and how often it goes again."""

    bins: tuple[Bin, ...] = Field(
        default=(
            Bin(from_s=1.0, to_s=60.0, share=0.31),
            Bin(from_s=60.0, to_s=300.0, share=0.27),
            Bin(from_s=300.0, to_s=1800.0, share=0.14),
            Bin(from_s=1800.0, to_s=7200.0, share=0.17),
            Bin(from_s=7200.0, to_s=14400.0, share=0.06),
            Bin(from_s=14400.0, to_s=43200.0, share=0.05),
        ),
        min_length=1,
        max_length=100,
        description="Lengths of outages.",
    )
    restrike_share: Share = Field(default=0.25, description="Outages that strike a second time.")
    most_restrikes: int = Field(default=1, ge=1, le=100, description="So often at most, each with that share.")
    restrike_after_s: float = Field(default=120.0, ge=10.0, le=1e6, description="Median time until they do.")
    restrike_spread: float = Field(default=0.3, ge=0.0, le=2.0, description="Spread of that time (of its logarithm).")
    sag_share: Share = Field(default=0.0, description="Outages that are sags of some seconds instead.")
    sag_s: tuple[float, float] = Field(default=(0.5, 10.0), description="Length of a sag.")
    flapping_share: Share = Field(default=0.03, description="With faults: outages that begin with some short dips.")
    dip_s: Span = Field(default=(1.0, 20.0), description="Length of such a dip.")
    between_dips_s: Span = Field(default=(5.0, 60.0), description="Utility between two dips.")

    @model_validator(mode="after")
    def _bins_hold(self) -> Self:
        if not any(site_bin.share for site_bin in self.bins):
            msg = "bins: at least one share must be above 0"
            raise ValueError(msg)
        for site_bin in self.bins:
            if site_bin.to_s < site_bin.from_s:
                msg = f"bins: to_s must not be below from_s (got {site_bin.from_s:g} to {site_bin.to_s:g})"
                raise ValueError(msg)
        if not 0.0 < self.sag_s[0] <= self.sag_s[1]:
            msg = "sag_s must be [least, most], both above 0"
            raise ValueError(msg)
        return self


class UpsSite(Options):
    """The UPS as it is built, and how well its gauge counts."""

    runtime_table: dict[Annotated[float, Field(gt=0.0, le=100.0)], Annotated[float, Field(gt=0.0, le=1e6)]] = Field(
        default={50.0: 540.0, 75.0: 360.0, 100.0: 240.0},
        min_length=1,
        description="Load in percent of the rating: seconds that a new, full battery lasts (data sheet).",
    )
    below_table_loss: Shares = Field(
        default=(0.02, 0.05),
        description="Own consumption, as a share of the rating, that bounds runtimes at small loads.",
    )
    standby_load: Share = Field(default=0.03, description="Load of a host that is off, as a share of the rating.")
    recharge_h: float = Field(default=8.0, gt=0.0, le=1000.0, description="From empty to full.")
    health: Parts = Field(default=(0.6, 1.0), description="Energy that the battery still holds.")
    charge: Shares = Field(default=(1.0, 1.0), description="Charge when utility fails.")
    bad_cell_share: Share = Field(default=0.02, description="Batteries that die at once, somewhere on the way.")
    coulomb_share: Share = Field(
        default=0.5, description="Gauges that count against the nameplate and fall off a cliff; the others over-report."
    )
    gauge_error: Share = Field(default=0.05, description="Error of the runtime that it computes, either way.")
    minutes_share: Share = Field(default=0.25, description="UPSes that report whole minutes.")
    smoothing_s: Span = Field(default=(10.0, 20.0), description="Until the runtime follows a step of the load.")
    knee: Shares = Field(default=(0.08, 0.25), description="Share of the battery that is left when its voltage falls.")
    knee_flag_share: Share = Field(default=0.5, description="UPSes that call low battery by voltage, not by runtime.")
    low_battery_s: Seconds = Field(default=120.0, description="Reported runtime that the others call low.")
    load_noise: Share = Field(default=0.01, description="Noise of the reported load, either way.")
    restart_s: Seconds = Field(default=5.0, description="From utility back to output on, after the output was off.")

    @field_validator("runtime_table")
    @classmethod
    def _falls(cls, table: dict[float, float]) -> dict[float, float]:
        return falls_with_load(table)


class HostSite(Options):
    """The host: what it draws and how long it takes."""

    load: float = Field(default=0.75, gt=0.0, le=1.0, description="Load in training, as a share of the UPS's rating.")
    paused_load: float = Field(default=0.35, gt=0.0, le=1.0, description="Load when paused, as a share of that.")
    capped_load: float = Field(default=0.67, gt=0.0, le=1.0, description="Load when capped, as a share of that.")
    capped_speed: float = Field(default=0.80, gt=0.0, le=1.0, description="Training speed when capped.")
    stop_median_s: float = Field(default=45.0, gt=0.0, le=1e4, description="From the order to off.")
    stop_spread: float = Field(default=0.25, ge=0.0, le=2.0, description="Spread of that time (of its logarithm).")
    stop_stuck_share: Share = Field(default=0.15, description="Stops in which a unit does not end.")
    stop_stuck_s: Span = Field(default=(105.0, 150.0), description="How long those take.")
    off_s: Seconds = Field(default=1.0, description="From the forced power-off to dark.")
    boot_s: Seconds = Field(default=100.0, description="From power on to a running daemon.")
    resumed_s: Seconds = Field(default=180.0, description="From power on to training again, after an orderly stop.")
    dirty_s: Seconds = Field(default=480.0, description="The same after power was lost under a running host.")
    always_on_share: Share = Field(default=1.0, description="Hosts whose BMC powers on when AC returns.")
    signals: bool = Field(default=True, description="Trainers that draw on may be signalled (signals.kind: helper).")


class TrainerSite(Options):
    """The training job."""

    checkpoint_median_s: float = Field(default=20.0, gt=0.0, le=1e4, description="A checkpoint, to durable.")
    checkpoint_spread: float = Field(default=0.25, ge=0.0, le=2.0, description="Spread of that (of its logarithm).")
    hung_share: Share = Field(default=0.02, description="Checkpoints that never end.")
    estimate: float = Field(
        default=1.5, gt=0.0, le=100.0, description="What the trainer says it takes, as a multiple of the median."
    )
    local_every_s: float = Field(default=300.0, gt=0.0, le=1e6, description="It saves by itself this often.")
    remote_every_s: float = Field(
        default=1800.0, gt=0.0, le=1e6, description="It copies to a second tier this often; not in an outage."
    )
    step_s: float = Field(default=0.5, gt=0.0, le=1e4, description="Length of a training step.")
    stall_s: Seconds = Field(default=0.5, description="How long a checkpoint during training delays it.")
    restart_s: Seconds = Field(default=60.0, description="Until it trains again after it has died, by its supervisor.")
    pause_late_s: Seconds = Field(default=0.0, description="It pauses this much later than it should.")
    never_pauses_share: Share = Field(default=0.0, description="Trainers that promise to pause and do not.")
    draws_on_share: Share = Field(default=0.0, description="Trainers that pause, and whose GPUs draw on.")
    mute_share: Share = Field(default=0.0, description="Trainers that do not answer, and train on.")
    spins_share: Share = Field(
        default=0.3, description="Of all those that draw on: their GPUs do so even when they are stopped by a signal."
    )


class DrillSite(Options):
    """The results of a drill on this host, known beforehand."""

    done: bool = Field(default=False, description="Battery health and the load drop of a pause were measured.")
    cap: bool = Field(default=False, description="The gain of a power cap was measured too, and it is allowed.")
    health_error: Share = Field(default=0.03, description="Error of the measured health, either way.")
    health_factor: float = Field(default=1.0, gt=0.0, le=2.0, description="Falsifies the measured health.")


class FaultSite(Options):
    """How often the world breaks with --faults, each in its share of the outages."""

    glitch_rate: Share = Field(default=0.003, description="Single readings with nonsense in them.")
    glitches_always: bool = Field(default=False, description="Glitches without --faults as well.")
    silent_field_share: Share = Field(default=0.15, description="UPSes that do not report one of their figures.")
    source_lost_share: Share = Field(default=0.06, description="The source falls silent.")
    source_lost_s: Span = Field(default=(3.0, 120.0), description="For how long.")
    source_gone_share: Share = Field(default=0.3, description="Of those: without end.")
    second_share: Share = Field(default=0.2, description="UPSes with a second source.")
    second_lag_s: Span = Field(default=(0.0, 30.0), description="By how much that one is late.")
    second_ill_share: Share = Field(default=0.6, description="Of those: frozen, stuck, silent or forged for a while.")
    second_ill_s: Span = Field(default=(20.0, 1200.0), description="For how long.")
    second_reordered_share: Share = Field(default=0.1, description="Of those: it reports older readings after newer.")
    network_lost_share: Share = Field(
        default=0.03, description="This host's network, and every source, go with utility."
    )
    network_back_s: Span = Field(default=(20.0, 90.0), description="From utility back to the network back.")
    twin_share: Share = Field(default=0.06, description="Hosts that another UPS feeds as well.")
    twin_apart_share: Share = Field(
        default=0.3, description="Of those that need both: the other UPS hangs on another circuit, which stays."
    )
    daemon_killed_share: Share = Field(default=0.08, description="The daemon is killed, and started again.")
    daemon_away_s: Span = Field(default=(1.0, 15.0), description="Until it runs again.")
    bmc_refuses_share: Share = Field(default=0.05, description="The BMC refuses every order.")
    countdown_share: Share = Field(default=0.02, description="Another program orders the UPS's output off.")
    countdown_s: Span = Field(default=(60.0, 300.0), description="Length of such a countdown.")
    fsd_share: Share = Field(default=0.02, description="Another host forces all hosts down (FSD).")
    fsd_delay_s: Span = Field(default=(45.0, 90.0), description="From FSD to output off.")
    clock_step_share: Share = Field(default=0.05, description="The wall clock is wrong after a boot.")
    trainer_dies_share: Share = Field(default=0.02, description="The trainer dies when it is asked for a checkpoint.")
    late_pause_share: Share = Field(default=0.03, description="It pauses late.")
    late_pause_s: Span = Field(default=(5.0, 60.0), description="By how much.")
    never_pauses_share: Share = Field(default=0.02, description="It never pauses.")
    draws_on_share: Share = Field(default=0.02, description="It pauses, and its GPUs draw on.")
    mute_share: Share = Field(default=0.02, description="It does not answer, and trains on.")
    joins_share: Share = Field(
        default=0.05, description="It answers with an older checkpoint that is on its way when it is asked."
    )
    disk_full_share: Share = Field(default=0.02, description="Its disk is full: no new checkpoint becomes durable.")
    rank_lost_share: Share = Field(
        default=0.03, description="One of its ranks falls silent in every checkpoint, and the others give it up."
    )
    rank_lost_s: Span = Field(default=(5.0, 60.0), description="After this time.")
    torn_share: Share = Field(default=0.04, description="The newest checkpoints turn out torn when it resumes.")
    low_charge_share: Share = Field(default=0.10, description="The battery is not full.")
    low_charge: Shares = Field(default=(0.3, 1.0), description="How full it is then.")


class ReturnSite(Options):
    """Power-on methods in addition to the BMC's policy, each with its share of the hosts. None by default."""

    output_share: Share = Field(default=0.0, description="Hosts that switch their UPS's output off and on again.")
    aborts_share: Share = Field(default=0.0, description="Of those UPSes: they abort the cut when utility returns.")
    stays_off_share: Share = Field(default=0.0, description="Of those: they cut, and stay off.")
    unknown_share: Share = Field(default=0.0, description="Of those: their profile does not say which.")
    hidden_share: Share = Field(default=0.0, description="Of those: they show no countdown that this host has ordered.")
    rtc_share: Share = Field(default=0.0, description="Hosts that their clock wakes.")
    sentinel_share: Share = Field(default=0.0, description="Hosts that a sentinel powers on.")
    watchdog_share: Share = Field(default=0.0, description="Hosts that their BMC's watchdog power-cycles.")
    late_share: Share = Field(default=0.0, description="Hosts whose power-off may end in a reboot.")
    lies_share: Share = Field(default=0.0, description="BMCs that take a policy and keep none.")
    bracket_share: Share = Field(
        default=0.0, description="Hosts with bmc.policy: bracket, which is set for the outage only. Level loop."
    )
    dry_run_share: Share = Field(default=0.0, description="Hosts in dry-run: no method may be armed. Level loop.")
    fails_share: Share = Field(default=0.05, description="With faults: each way that does not do what it promises.")
    foreign_share: Share = Field(default=0.05, description="With faults: another program stops the host on battery.")
    foreign_s: Span = Field(default=(5.0, 300.0), description="When, from the first cut.")
    called_off_share: Share = Field(default=0.0, description="Of those: the shutdown is called off. Level loop.")


class RackSite(Options):
    """Several hosts on the UPS. Load and standby load are then those of all hosts together. Without faults."""

    hosts: tuple[Annotated[int, Field(ge=0, le=100)], ...] = Field(
        default=(), max_length=10, description="Hosts of each tier, the lowest first. Empty: one host, no tiers."
    )
    others_share: Share = Field(
        default=0.0, description="Hosts without powerguard: half of them run nut, half draw to the end."
    )
    stagger_s: Seconds = Field(default=5.0, description="From one host's power-on to the next one's.")

    @field_validator("hosts")
    @classmethod
    def _has_hosts(cls, hosts: tuple[int, ...]) -> tuple[int, ...]:
        if hosts and not 1 <= sum(hosts) <= MOST_HOSTS:
            msg = f"must be 1 to {MOST_HOSTS} hosts in all, got {sum(hosts)}"
            raise ValueError(msg)
        return hosts


class ClusterSite(Options):
    """Several hosts that run one job under Slurm (--job), each alone behind its UPS."""

    hosts: tuple[Annotated[int, Field(ge=2, le=32)], Annotated[int, Field(ge=2, le=32)]] = Field(
        default=(2, 4), description="Hosts of the cluster."
    )
    spare_share: Share = Field(default=0.3, description="Clusters of three hosts or more of which the job leaves one.")
    apart_share: Share = Field(
        default=0.5, description="Clusters with a second feed, which stays, goes later or is back earlier."
    )
    longest_s: Seconds = Field(default=1200.0, description="No outage of a cluster lasts longer.")
    hold_share: Share = Field(default=0.3, description="Settings with scheduler.hold.")
    no_requeue_share: Share = Field(default=0.05, description="Jobs that may not be requeued.")
    fault_share: Share = Field(
        default=0.2, description="With faults, each: slurmctld hangs, is late, refuses, lies about a node, garbles."
    )
    fault_s: Span = Field(default=(5.0, 600.0), description="For how long.")
    deed_share: Share = Field(
        default=0.15,
        description="With faults, each: a person drains a node, resumes one, adds words to powerguard's reason; "
        "Slurm requeues the job by itself, forgets a reason.",
    )

    @field_validator("hosts")
    @classmethod
    def _ascend(cls, hosts: tuple[int, int]) -> tuple[int, int]:
        if hosts[0] > hosts[1]:
            msg = f"must be [least, most], got [{hosts[0]}, {hosts[1]}]"
            raise ValueError(msg)
        return hosts


class Site(Options):
    """One site: the world's numbers."""

    ups: UpsSite = Field(default=UpsSite(), description="UPS and battery.")
    outage: OutageSite = Field(default=OutageSite(), description="Utility.")
    host: HostSite = Field(default=HostSite(), description="The host.")
    trainer: TrainerSite = Field(default=TrainerSite(), description="The training job.")
    drill: DrillSite = Field(default=DrillSite(), description="What a drill has measured.")
    faults: FaultSite = Field(default=FaultSite(), description="What breaks, with --faults.")
    returns: ReturnSite = Field(default=ReturnSite(), description="What brings a host back.")
    rack: RackSite = Field(default=RackSite(), description="Other hosts on the UPS.")
    cluster: ClusterSite = Field(default=ClusterSite(), description="Hosts that run one job under Slurm.")


def warnings(site: Site) -> list[str]:
    """Return what makes a valid site a world in which no training would be run, for the operator."""
    trainer = site.trainer
    if trainer.checkpoint_median_s < trainer.local_every_s:
        return []
    times = f"({trainer.checkpoint_median_s:g} s) is not below trainer.local_every_s ({trainer.local_every_s:g} s)"
    saves = "its own saves take 20 s in this world, which favours the policies that ask for no checkpoint"
    return [f"trainer.checkpoint_median_s {times}: such a trainer would save without end; {saves}"]


def load(path: Path) -> Site:
    """Read a site file. Raises SettingsError with every mistake, each with file:line:column."""
    try:
        document = load_file(path)
    except YamlFileError as error:
        raise SettingsError([str(problem) for problem in error.problems]) from error
    if document.data is None:
        return Site()
    if not isinstance(document.data, dict):
        raise SettingsError([f"{document.where(())}: must be a map of sections (ups, outage, host, trainer, ...)"])
    return validate(Site, Files(document.data, (document,), {}), Site.model_json_schema)
