"""The story that the demo plays: a dip, an outage that is held through, an outage to the end; and whether it is true.

A `Stage` is a world with a daemon in it; the same story is played on a live one (real sockets and processes) and on one
in virtual time. Every line comes from the daemon's journal, except what only the world itself knows: what
the battery really held, what the BMC really stores, what is really on the disk.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import Line

SCHEMA_VERSION = 1
_BAR = 64


class StoryError(Exception):
    """The world did not do what the story needs: what was waited for, and for how long."""


@contextlib.contextmanager
def folder_of(keep: Path | None, *, within: str | None = None) -> Iterator[Path]:
    """Make the folder of one demo: `keep`, to be left behind; None: one of its own, that goes. Raises StoryError.

    within: where its own is made; None: where temporary things are.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="pg-demo-", dir=within) as name:
            yield Path(name)
        return
    folder = keep.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        msg = f"{folder}: {error.strerror}: give --keep a new folder that this user can make"
        raise StoryError(msg) from None
    if not is_empty:  # an older demo's remains in it would be taken for this one's
        msg = f"{folder} is not empty: give --keep a new folder"
        raise StoryError(msg)
    yield folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The truth of the world, which the daemon does not see.

    left_s: seconds that the battery really lasted when the power-off was ordered. checkpoint_step: step of the newest
    checkpoint that verifies to the last byte; step: where training stands. policy: what the BMC stores.
    """

    left_s: float | None
    policy: str
    checkpoint_step: int | None
    step: int | None
    paused: bool


class Stage(Protocol):
    """A world with a daemon in it."""

    title: str
    real: Sequence[str]
    replaced: Sequence[str]
    settle_s: float
    dip_s: float
    hold_s: float
    recharge_s: float
    patience_s: float
    look_s: float

    def clock(self) -> float:
        """Seconds, of the clock that the daemon's journal uses."""
        ...

    def set_utility(self, present: bool) -> None:  # noqa: FBT001 - it is what is set
        """Pull the plug, or put it back."""
        ...

    def lines(self) -> Sequence[Line]:
        """The newest lines of the journal, the oldest of them first."""
        ...

    async def facts(self) -> Facts:
        """Look behind the daemon's back."""
        ...

    def check(self) -> None:
        """Raise StoryError if a part of the world has died."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim of the story and whether it is true."""

    name: str
    holds: bool
    observed: str


@dataclass(slots=True)
class Act:
    """One cut of the story. cut_at_s, back_at_s: when the world flipped; lines: what the journal said meanwhile.

    host: whose journal; "" if there is one host.
    """

    name: str
    cut_at_s: float
    host: str = ""
    back_at_s: float | None = None
    lines: list[Line] = field(default_factory=list)
    facts: Facts | None = None

    def at(self, event: str, **wanted: Any) -> float | None:  # noqa: ANN401 - a note's numbers
        """When a note was first made, with these numbers; None if it was not."""
        line = self.find(event, **wanted)
        return None if line is None else line.at_s

    def find(self, event: str, **wanted: Any) -> Line | None:  # noqa: ANN401 - as above
        """Return the first such note."""
        return self._find(self.lines, event, wanted)

    def last(self, event: str, **wanted: Any) -> Line | None:  # noqa: ANN401 - as above
        """Return the last such note."""
        return self._find(tuple(reversed(self.lines)), event, wanted)

    @staticmethod
    def _find(lines: Sequence[Line], event: str, wanted: dict[str, Any]) -> Line | None:
        for line in lines:
            if line.kind == "note" and line.event == event:
                values = numbers(line)
                if all(values.get(key) == value for key, value in wanted.items()):
                    return line
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it. title, real, replaced: of the world it was played in."""

    title: str
    real: Sequence[str]
    replaced: Sequence[str]
    acts: Sequence[Act]
    checks: Sequence[Check]
    seconds: float

    @property
    def safe(self) -> bool:
        """Every claim is true."""
        return all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "schema_version": SCHEMA_VERSION,
            "object": "demo",
            "world": self.title,
            "real": list(self.real),
            "replaced": list(self.replaced),
            "safe": self.safe,
            "seconds": round(self.seconds, 3),
            "checks": [asdict(check) for check in self.checks],
            "outages": [
                {"name": act.name, **({"host": act.host} if act.host else {}), "events": events(act)}
                for act in self.acts
            ],
        }


def numbers(line: Line) -> dict[str, Any]:
    """Return the numbers of a note as a dictionary."""
    pairs = line.payload.get("numbers")
    return dict(pairs) if isinstance(pairs, list) else {}


def events(act: Act) -> list[dict[str, Any]]:
    """Return the notes of an act, seconds counted from the cut."""
    return [
        {"after_s": round(line.at_s - act.cut_at_s, 3), "event": line.event, "because": line.because, **numbers(line)}
        for line in act.lines
        if line.kind == "note"
    ]


async def play(stage: Stage, print_text: Callable[[str], None]) -> Report:
    """Play the story, and print it live. Raises StoryError when the world stands still."""
    began_s = stage.clock()
    narrator = Narrator({"": stage}, print_text)
    await narrator.until(lambda: stage.clock() - began_s >= stage.settle_s, "start")
    (dip,) = narrator.cut("A short dip")
    await narrator.wait(stage.dip_s)
    await narrator.until(lambda: dip.find("outage_began") is not None, "the dip to be noticed")
    narrator.back()
    await narrator.until(lambda: dip.find("outage_ended") is not None, "the dip to end")
    dip.facts = await stage.facts()
    await narrator.wait(stage.settle_s)

    (held,) = narrator.cut("An outage that the battery outlasts")
    before = await stage.facts()
    await narrator.until(lambda: held.find("phase_changed", new="holding") is not None, "everything to be durable")
    await narrator.wait(stage.hold_s)
    paused = await stage.facts()
    narrator.back()
    await narrator.until(lambda: held.find("outage_ended") is not None, "training to go on in place")
    await narrator.wait(stage.recharge_s)
    held.facts = await stage.facts()

    (long,) = narrator.cut("An outage to the end")
    await narrator.until(lambda: long.find("power_off_accepted") is not None, "the power-off")
    long.facts = await stage.facts()
    narrator.say("the host is off now; all that is left is on the disk and in the BMC")
    checks = [_dip_check(dip), *_held_checks(held, before, paused), *_long_checks(long)]
    return Report(
        title=stage.title,
        real=stage.real,
        replaced=stage.replaced,
        acts=(dip, held, long),
        checks=checks,
        seconds=stage.clock() - began_s,
    )


class Narrator:
    """Follows the journals of all hosts and says in words what they do. stages: each host's world, by its name."""

    def __init__(self, stages: Mapping[str, Stage], print_text: Callable[[str], None]) -> None:
        self._stages = dict(stages)
        self._print_text = print_text
        self._first = next(iter(self._stages.values()))
        self._began_s = self._first.clock()
        self._seen = {host: max((line.seq for line in stage.lines()), default=0) for host, stage in stages.items()}
        self._acts: dict[str, Act] = {}

    def say(self, text: str, at_s: float | None = None, host: str = "") -> None:
        """Print it, with the time since the start."""
        at_s = self._first.clock() if at_s is None else at_s
        self._print_text(f"{at_s - self._began_s:7.1f} s  {host and host + ': '}{text}")

    def cut(self, name: str) -> tuple[Act, ...]:
        """Pull the plug. Returns an act for each host."""
        self._follow()
        self._print_text(f"\n{name}")
        self.say("-- the plug is pulled --")
        self._acts = {host: Act(name, stage.clock(), host) for host, stage in self._stages.items()}
        for stage in self._stages.values():
            stage.set_utility(False)
        return tuple(self._acts.values())

    def back(self) -> None:
        """Put the plug back."""
        for host, stage in self._stages.items():
            stage.set_utility(True)
            self._acts[host].back_at_s = stage.clock()
        self.say("-- utility is back --")

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self._first.clock() + seconds
        await self.until(lambda: self._first.clock() >= until_s, "time to pass")

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        """Follow until it is so. Raises StoryError if that takes too long or a part of the world has died."""
        try:
            async with asyncio.timeout(self._first.patience_s):
                while True:
                    self._follow()
                    for stage in self._stages.values():
                        stage.check()
                    if reached():
                        return
                    await rest(self._first.look_s)
        except TimeoutError:
            msg = f"waited {self._first.patience_s:.0f} s for {what}, in vain"
            raise StoryError(msg) from None

    def _follow(self) -> None:
        news: list[tuple[float, str, Line]] = []
        for host, stage in self._stages.items():
            lines = [line for line in stage.lines() if line.seq > self._seen[host]]
            news += [(line.at_s, host, line) for line in lines]
            self._seen[host] = max((line.seq for line in lines), default=self._seen[host])
            if host in self._acts:
                self._acts[host].lines += lines
        for at_s, host, line in sorted(news, key=lambda each: each[0]):
            if text := sentence(line):
                self.say(text, at_s, host)


def seconds(value: object) -> str:
    """Return seconds for display; "?" where they are not known."""
    return f"{value:.0f} s" if isinstance(value, int | float) else "?"


def sentence(line: Line) -> str:
    """Return one line of the journal in words; "" for a line that is left out."""
    if line.kind != "note":
        return ""
    note = numbers(line)
    match line.event:
        case "outage_began":
            return (
                f"on battery, the second witness is {line.because}: charge {note.get('charge_pct'):.0f} %, "
                f"load {note.get('load_pct'):.0f} %, the UPS promises {seconds(note.get('runtime_s'))}"
            )
        case "phase_changed":
            return _phase_sentence(line, note)
        case "checkpoint_ordered":
            return f"asked trainer {note.get('trainer')} for a checkpoint (then: {note.get('after')})"
        case "checkpoint_durable":
            return f"checkpoint durable: {note.get('trainer')} at step {note.get('step')}, {note.get('took_s'):.1f} s"
        case "policy_verified":
            return f"BMC policy read back: {note.get('policy')}"
        case "power_off_accepted":
            return f"power-off ordered (recorded, not done): by force in {seconds(note.get('deadline_s'))}"
        case "outage_ended":
            return f"outage over: {str(note.get('outcome')).replace('_', ' ')} after {seconds(note.get('lasted_s'))}"
        case "action_failed" | "source_lost" | "load_not_fallen_raised" | "battery_low":
            return f"{line.event.replace('_', ' ')}: {line.because}"
        case _:
            return ""


def _phase_sentence(line: Line, note: dict[str, Any]) -> str:
    match note.get("new"):
        case "on_battery":
            return (
                f"training goes on: effective runtime {seconds(note.get('reff_now_s'))}, "
                f"{seconds(note.get('reff_paused_s'))} if paused; needed {seconds(note.get('checkpoint_s'))} "
                f"+ {seconds(note.get('stop_s'))}"
            )
        case "emergency_checkpoint":
            return f"pause and checkpoint, because of {line.because}: {seconds(note.get('slack_s'))} to spare"
        case "holding":
            return f"holding, because {line.because}; the paused load makes the battery last"
        case "shutdown":
            return f"COMMIT, because of {line.because}: {seconds(note.get('reff_paused_s'))} left, stop needs it"
        case "online":
            return f"back to normal, because {line.because}"
        case _:
            return ""


# --- Is it true? --------------------------------------------------------------------------------------------------


def _dip_check(dip: Act) -> Check:
    ordered = dip.find("checkpoint_ordered")
    ended = dip.find("outage_ended")
    outcome = None if ended is None else numbers(ended).get("outcome")
    return Check(
        name="the dip was ridden through",
        holds=ordered is None and outcome == "ridden_through",
        observed=f"outcome {outcome}, trainer {'never heard of it' if ordered is None else 'was disturbed'}",
    )


def _held_checks(held: Act, before: Facts, paused: Facts) -> list[Check]:
    durable = held.last("checkpoint_durable")
    step = None if durable is None else numbers(durable).get("step")
    ended = held.find("outage_ended")
    outcome = None if ended is None else numbers(ended).get("outcome")
    after = held.facts.step if held.facts is not None else None
    went_on = paused.step is not None and after is not None and after > paused.step
    return [
        Check(
            name="the emergency checkpoint is durable at the paused step",
            holds=step is not None and step == paused.checkpoint_step == paused.step and paused.paused,
            observed=f"journal {step}, stored {paused.checkpoint_step}, training paused at {paused.step}",
        ),
        Check(
            name="training resumed in place without a reboot",
            holds=outcome == "resumed_in_place" and went_on,
            observed=f"outcome {outcome}; step {before.step} at the cut, {paused.step} paused, {after} now",
        ),
    ]


def _long_checks(long: Act) -> list[Check]:
    facts = long.facts
    durable = long.last("checkpoint_durable")
    step = None if durable is None else numbers(durable).get("step")
    off = long.find("power_off_accepted")
    deadline_s = None if off is None else numbers(off).get("deadline_s")
    left_s = None if facts is None else facts.left_s
    on_disk = None if facts is None else facts.checkpoint_step
    enough = left_s is not None and deadline_s is not None and left_s >= deadline_s
    return [
        Check(
            name="the last checkpoint is durable and verified",
            holds=step is not None and step == on_disk and facts is not None and step == facts.step,
            observed=f"journal {step}, stored {on_disk}, training stood at {None if facts is None else facts.step}",
        ),
        Check(
            name="the host will come back",
            holds=facts is not None and facts.policy == "always-on" and long.find("policy_verified") is not None,
            observed=f"the BMC itself says {'?' if facts is None else facts.policy}",
        ),
        Check(
            name="the host went down in order, before the battery was empty",
            holds=enough,
            observed=f"{seconds(left_s)} really left in the battery, {seconds(deadline_s)} until the forced power-off",
        ),
    ]


# --- The timeline ---------------------------------------------------------------------------------------------------


def timeline(act: Act) -> list[str]:
    """Return the budget of an outage as a picture: what the seconds on battery were spent on."""
    parts = stretches(act)
    if not parts:
        return []
    scale = _BAR / max(sum(lasts_s for _, _, lasts_s in parts), 1e-6)
    bar = "".join(sign * max(1, round(lasts_s * scale)) for _, sign, lasts_s in parts)
    legend = [f"{sign} {name} {lasts_s:.1f} s" for name, sign, lasts_s in parts]
    return [f"  |{bar}|", "   " + ",  ".join(legend)]


def together(acts: Sequence[Act]) -> list[str]:
    """Return one outage of several hosts as a picture: a bar for each host, all on one time axis."""
    known = {act.host: [each for each in stretches(act) if each[1] != "_"] for act in acts}
    span_s = max(sum(lasts_s for _, _, lasts_s in parts) for parts in known.values())
    wide = max(len(host) for host in known)
    scale = (_BAR - wide) / max(span_s, 1e-6)
    lines = []
    for host, parts in known.items():
        bar = "".join(sign * max(1, round(lasts_s * scale)) for _, sign, lasts_s in parts)
        lines.append(f"  {host:<{wide}} |{bar}")
    end = f"{span_s:.0f} s"
    lines.append(f"  {'':<{wide}}  0{end:>{_BAR - wide - 1}}")
    legend = {sign: name for parts in known.values() for name, sign, _ in parts}
    return [*lines, "  " + ",  ".join(f"{sign} {name}" for sign, name in legend.items())]


def stretches(act: Act) -> list[tuple[str, str, float]]:
    """Return what each stretch of an outage was, its sign, and how long it lasted, from the cut on."""
    marks = [
        ("train on", act.cut_at_s, "="),
        ("checkpoint", act.at("phase_changed", new="emergency_checkpoint"), "c"),
        ("hold", act.at("phase_changed", new="holding"), "."),
        ("stop", act.at("phase_changed", new="shutdown"), "#"),
    ]
    known = [(name, at_s, sign) for name, at_s, sign in marks if at_s is not None]
    end_s = act.back_at_s
    stop = act.find("power_off_accepted")
    if stop is not None:
        end_s = stop.at_s + float(numbers(stop).get("deadline_s") or 0.0)
        left_s = None if act.facts is None else act.facts.left_s
        if left_s is not None:
            known.append(("left in the battery", end_s, "_"))
            end_s = max(end_s, stop.at_s + left_s)
    if end_s is None:
        return []
    ends = [*(at_s for _, at_s, _ in known[1:]), end_s]
    return [(name, sign, min(end_s, until_s) - at_s) for (name, at_s, sign), until_s in zip(known, ends, strict=True)]
