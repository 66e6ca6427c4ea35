"""One outage at the loop level: lives of the daemon, boots of the host, until it trains again or cannot.

`play_many` plays many of them, for `powerguard simulate --level loop`.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from powerguard.core.model.policy import BatteryModel, Drop, Health, Learned
from powerguard.core.model.serialisation import to_plain
from powerguard.core.model.state import Battery, Online, Shutdown, State
from powerguard.daemon.journal import JournalError, Loaded, read_all, read_only
from powerguard.daemon.journal.records import Snapshot, dump
from powerguard.daemon.journal.store import Batch, Store
from powerguard.settings.schema import Settings
from powerguard.sim.looped.life import EPOCH_S, TRAINER, Life
from powerguard.sim.looped.mischief import Mischief
from powerguard.sim.looped.mischief import draw as draw_mischief
from powerguard.sim.looped.witness import Hardware, OutageWitness, Violation
from powerguard.sim.world.back import Waker
from powerguard.sim.world.chance import stream
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.many import Progress, spread
from powerguard.sim.world.policies import best, bound
from powerguard.sim.world.report import Sample, SimulationOptions, returned
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.scene import draw as draw_scene
from powerguard.sim.world.site import ReturnSite, Site
from powerguard.sim.world.world import UPS, World

BEGIN_S = -40.0
_BOOTED_S = 100_000.0
_LOOK_S = 20.0
_PATIENCE_S = 1.5 * 3600.0
_ALARM_S = 30 * 3600.0
"""A clock that is to wake the host after hours, and that was put off, has done so by then."""
_RESTORE_S = 4.5 * 3600.0
"""A BMC that refuses to take its policy back is asked again every hour."""
_MOST_LIVES = 60
_DRILLED = 0.5
_NOWHERE = "/nowhere"
"""Whatever is not replaced in this world must find nothing of the machine that plays it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedResult:
    """How one outage went. how: "finished", or why not. dirty: power was lost so often under a host that was up.

    needless: it was powered off, and the battery would have carried it, paused, until utility was back.
    lost_s: of training. sent: orders to a UPS to cut its output; rebooted: power-offs that were to end in a reboot.
    wakers, waited_s: as in `world.run.Result`.
    """

    seed: int
    how: str
    violations: tuple[Violation, ...]
    lives: int
    boots: int
    latches: int
    holds: int
    dirty: int
    planning_dirty: bool
    needless: bool
    stranded: bool
    wakers: tuple[Waker, ...]
    waited_s: float
    sent: int
    rebooted: int
    rollback_s: float
    lost_s: float


def settings_of(scene: Scene, site: Site) -> Settings:
    """Return the settings that this host's operator has written."""
    budget: dict[str, object] = {"recharge_h": site.ups.recharge_h}
    if site.drill.done:
        budget["health"] = round(min(1.0, max(0.2, scene.measured_health)), 3)
    facts = scene.returns
    ups: dict[str, object] = {
        "sources": [{"kind": "snmp", "host": "127.0.0.1", "version": "2c"}],
        "runtime_table": dict(site.ups.runtime_table),
    }
    if facts.output:
        ups["output_off"] = {"by": "snmp", "dedicated_network": True}
    sentinel = {"kind": "http", "urls": ["https://127.0.0.1:1"], "key": {"file": f"{_NOWHERE}/key"}}
    return Settings.model_validate(
        {
            "mode": "dry-run" if facts.dry_run else "armed",
            "ups": {UPS: ups},
            "host": {"kind": "systemd", "fifo": f"{_NOWHERE}/off", "late_reboot": facts.late},
            "bmc": {
                "kind": "in-band",
                "socket": f"{_NOWHERE}/ipmi.sock",
                "policy": "bracket" if facts.bracket else "ensure",
                "watchdog": facts.watchdog,
            },
            "rtc": {"kind": "device" if facts.rtc else "none", "device": f"{_NOWHERE}/rtc"},
            "sentinel": sentinel if facts.sentinel else {"kind": "none"},
            "gpu": {"kind": "nvml"},
            "signals": {"kind": "helper" if site.host.signals else "none"},
            "budget": budget,
            "trainers": [
                {"name": TRAINER, "url": f"unix:{_NOWHERE}/toy.sock", "checkpoint_s": scene.trainer.estimate_s}
            ],
            "trainer_sockets": None,
        }
    )


def _remembered(scene: Scene, site: Site) -> State | None:
    """What an earlier boot has learned in a drill, where this host had one."""
    drilled = site.drill.done or stream(scene.seed, "loop drill").random() < _DRILLED
    if not drilled:
        return None
    host, at_s = site.host, 0.0
    cap = Drop(before=host.load, after=host.load * host.capped_load, at_s=at_s, speed=host.capped_speed)
    pause = Drop(before=host.load, after=host.load * host.paused_load, at_s=at_s)
    health = Health(share=scene.measured_health, error=0.03, depth=0.4, at_s=at_s, how="drill (simulated)")
    return State(
        battery=Battery(health=scene.measured_health, model=BatteryModel(health=health)),
        learned=Learned(pauses=((TRAINER, pause),), cap=cap),
    )


class LoopedOutage:
    """Plays one scene, with what breaks in it."""

    def __init__(self, scene: Scene, mischief: Mischief, site: Site, folder: Path) -> None:
        """folder: empty, for the journals."""
        self.scene, self.mischief, self.site = scene, mischief, site
        self.world = World(self.scene, site, began_s=BEGIN_S)
        self.hardware = Hardware.of(self.world, folder)
        self.witness = OutageWitness(self.world, self.mischief, self.hardware)
        self.settings = settings_of(self.scene, site)
        self.boots = 1
        self.lives = 0
        self.needless = self.stranded = False
        self._dark_before_us = 0
        self._up_s = BEGIN_S
        self._offset_s = _BOOTED_S - BEGIN_S
        self._wall_error_s = 0.0
        self._calls: dict[str, int] = {}
        self._checkpoints: dict[str, tuple[float, HostAnswer]] = {}
        self._words = sorted(self.mischief.words)
        self._path = folder / "journal-0.sqlite"

    def play(self) -> LoopedResult:
        """Play it to its end."""
        remembered = _remembered(self.scene, self.site)
        if remembered is not None:
            self._seed(remembered)
        how = "too many lives"
        patience_s = _PATIENCE_S + (_RESTORE_S if self.scene.returns.bracket else 0.0)
        while self.lives < _MOST_LIVES:
            life = self._life()
            how = life.run(max(self.scene.end_s, self._up_s) + patience_s)
            if how in ("finished", "late"):
                break
            if how == "stopped":
                life.keep_journal()
            self._path = life.kept
            self.lives += 1
            if not self._next(how, life):
                how = "dark"
                break
        if how == "finished":
            self._look_back()
        elif not self._waits_for_ever():
            self.witness.broke("never_ended", f"the story is not over ({how})")
        return self._result(how)

    def _seed(self, state: State) -> None:
        store = Store(self._path)
        at_s = _BOOTED_S - 10.0
        snapshot = Snapshot(boot_id="b000-sim", at_s=at_s, wall=EPOCH_S - 1000.0, state=dump(to_plain(state)))
        store.write(Batch(snapshot=snapshot))
        store.close()

    def _life(self) -> Life:
        kills = self.mischief.kills
        return Life(
            world=self.world,
            mischief=self.mischief,
            witness=self.witness,
            hardware=self.hardware,
            settings=self.settings,
            path=self._path,
            boot=f"b{self.boots:03d}-sim",
            offset_s=self._offset_s,
            wall_error_s=self._wall_error_s,
            kill=kills[self.lives] if self.lives < len(kills) else None,
            stored=self._stored(),
            calls=self._calls,
            checkpoints=self._checkpoints,
            words=self._words,
            serial=self.lives,
        )

    def _stored(self) -> Loaded | None:
        try:
            with read_only(self._path) as db:
                return read_all(db)[0]
        except JournalError:
            return None

    def _next(self, how: str, life: Life) -> bool:
        """Go on to where a daemon runs again; False where none ever will."""
        world = self.world
        if how == "died":
            kills = self.mischief.kills
            world.advance(world.now_s + kills[life.serial].away_s)
        elif how == "stopped":
            world.advance(world.now_s + 2.0)
        is_same = world.host.power is Power.UP and world.back.starts == life.starts
        return is_same or self._boot()

    def _boot(self) -> bool:
        """Let time pass until the host is up again, and its daemon runs."""
        world = self.world
        if world.host.power is Power.STOPPING:
            world.advance(world.host.stop_ends_s)
        if world.host.power is Power.OFF:
            self.witness.methods.off()
        if world.host.power is Power.OFF and not world.foreign:
            self._was_it_needed()
        latest_s = max(world.now_s, self.scene.end_s) + (_PATIENCE_S if world.back.idle else _ALARM_S)
        while world.now_s < latest_s:
            if world.host.power is Power.DARK and self.hardware.crashed and world.output:
                world.press_button(Waker.ITSELF)
            elif world.stranded:
                self.stranded = True
                self.witness.methods.stranded()
                world.press_button()
            if world.host.power is Power.UP:
                self.hardware.crashed, self._up_s = False, world.now_s
                lost = len(world.host.dirty_at_s)
                world.advance(self._up_s + self.site.host.boot_s)
                self._dark_before_us += len(world.host.dirty_at_s) - lost
                if world.host.power is Power.UP:
                    break
            else:
                world.advance(world.now_s + _LOOK_S)
        else:
            return False
        world.foreign = False
        self.boots += 1
        self._offset_s = 30.0 - world.now_s
        self._wall_error_s = self.scene.wall_error_s
        self._checkpoints.clear()
        stored = self._stored()
        state = None if stored is None else stored.state
        if state is None or (isinstance(state.phase, Online) and not state.up) or self.scene.returns.dry_run:
            world.host.start_training(world.now_s)  # As after any boot that is none of ours: a person starts it.
        return True

    def _was_it_needed(self) -> None:
        """A power-off is needless where the battery would have carried the paused host; a foreign order is a need."""
        world, scene = self.world, self.scene
        ordered_s, left = world.ordered_off
        cut = next((cut for cut in scene.cuts if cut.begin_s <= ordered_s < cut.end_s), None)
        host = self.site.host
        carried_s = max(0.0, left - world.pack.dies_at) * scene.curve.tau_s(host.load * host.paused_load)
        if scene.order is None and (cut is None or carried_s >= cut.end_s - ordered_s):
            self.needless = True

    def _waits_for_ever(self) -> bool:
        """Say whether only what this world lacks can end it: a UPS that answers, or a person who starts training.

        The UPS has said "on battery" last, to a dry-run that has committed. The person has set maintenance, in which
        the host went down.
        """
        stored, silences = self._stored(), self.scene.silences
        state = None if stored is None else stored.state
        if state is None:
            return False
        is_left = state.unseen is not None and bool(state.unseen.left_because)
        if is_left and any(word == "maintenance" for _, word in self.mischief.words):
            return True
        is_committed = isinstance(state.phase, Shutdown)
        return self.scene.returns.dry_run and is_committed and any(end_s > self.world.now_s for _, end_s in silences)

    def _look_back(self) -> None:
        """See what is left behind."""
        host, stored = self.world.host, self._stored()
        self.witness.ended(
            training=host.training,
            capped=host.capped,
            stopped=host.stopped,
            open_outage="" if stored is None or stored.outage is None else stored.outage.id,
            in_flight=() if stored is None else stored.in_flight,
        )
        self.witness.methods.ended(None if stored is None else stored.state)

    def _result(self, how: str) -> LoopedResult:
        host = self.world.host
        return LoopedResult(
            seed=self.scene.seed,
            how=how,
            violations=tuple(self.witness.violations),
            lives=self.lives + 1,
            boots=self.boots,
            latches=self.witness.latches,
            holds=self.witness.holds,
            dirty=len(host.dirty_at_s),
            planning_dirty=len(host.dirty_at_s) > self._dark_before_us and self._was_avoidable(),
            needless=self.needless,
            stranded=self.stranded,
            wakers=tuple(self.world.back.wakers),
            waited_s=self.world.waited_s,
            sent=self.hardware.sent,
            rebooted=self.witness.methods.rebooted,
            rollback_s=host.rollback_s,
            lost_s=max(0.0, self.world.now_s - BEGIN_S - host.progress_s),
        )

    def _was_avoidable(self) -> bool:
        """Say whether nothing excuses a loss of power under a running host: no bad cell, no interference."""
        scene, mischief = self.scene, self.mischief
        trainer = scene.trainer
        return not (
            scene.dies_at
            or scene.order is not None
            or scene.silences
            or scene.gauge.silent
            or scene.charge < 0.95
            or trainer.never_pauses
            or trainer.pause_late_s
            or trainer.draws_on
            or trainer.mute
            or mischief.kills
            or mischief.people
            or mischief.crash_s is not None
            or mischief.words
            or scene.returns.dry_run
        )


def play(seed: int, site: Site, *, faults: bool, within: str | None = None) -> LoopedResult:
    """Play one outage. within: the folder for its journal; None: in memory, if a file system in memory is there."""
    with tempfile.TemporaryDirectory(prefix="pg-sim-", dir=within or _memory()) as folder:
        site = quick(site)
        scene = draw_scene(seed, site, faults=faults)
        mischief = draw_mischief(seed, faults=faults, methods=site.returns != ReturnSite())
        return LoopedOutage(scene, mischief, site, Path(folder)).play()


def _memory() -> str | None:
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own in it
    return str(memory) if memory.is_dir() else None


def quick(site: Site) -> Site:
    """Return the site with a battery that charges in minutes: a story must not wait for hours of utility."""
    ups = site.ups.model_copy(update={"recharge_h": min(site.ups.recharge_h, 0.25)})
    return site.model_copy(update={"ups": ups})


_CHUNK: Final = 10


def play_many(
    site: Site, options: SimulationOptions, *, jobs: int | None = None, progress: Progress = lambda _: None
) -> list[Sample]:
    """Play all outages of a run at the loop level. The samples come in no order. jobs: processes; None: all cores."""
    # The journals lie in a folder of this process: the others may be killed in the middle of an outage.
    with tempfile.TemporaryDirectory(prefix="pg-sim-", dir=_memory()) as folder:
        return spread(partial(_played, folder), site, options, jobs=jobs, chunk=_CHUNK, progress=progress)


def _played(folder: str, site: Site, options: SimulationOptions, seed: int) -> Sample:
    return one(seed, site, faults=options.faults, within=folder)


def one(seed: int, site: Site, *, faults: bool, within: str | None = None) -> Sample:
    """Play one outage at the loop level, and set it against what would have been best."""
    result = play(seed, site, faults=faults, within=within)
    shrunk = quick(site)
    scene = draw_scene(seed, shrunk, faults=faults)
    loss_s, facts = result.lost_s, scene.returns
    return Sample(
        seed=seed,
        excess_s=max(0.0, loss_s - best(scene, shrunk).loss_s),
        beyond_bound_s=max(0.0, loss_s - bound(scene, shrunk).loss_s),
        loss_s=loss_s,
        rollback_s=result.rollback_s,
        planning_dirty=result.planning_dirty,
        physics_dirty=result.dirty > 0 and not result.planning_dirty,
        shutdown=result.latches > 0,
        needless=result.needless,
        stranded=result.stranded,
        violations=tuple(f"{violation.name}: {violation.what}" for violation in result.violations),
        back=returned(scene, result.wakers, result.waited_s, arms=not facts.dry_run, brackets=facts.bracket),
    )
