"""What is worth a message: the core's notes and the daemon's standing reasons, each trouble at most once an hour."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from powerguard.core.comeback.gate import FAILED_AGAIN
from powerguard.core.decide.transitions import Cause
from powerguard.core.model.actions import Conduct, Level, Note
from powerguard.core.model.state import Online, Shutdown, State
from powerguard.core.supply import feeds, fusion
from powerguard.daemon.observe.readiness import ERRORS, FIXES, WARNINGS
from powerguard.fields import clean_text
from powerguard.yamlfile import load_file

AGAIN_S: Final = 3600.0
BURST: Final = 60
"""Messages that may follow each other at once; then one a minute. The rest is summed up in one message."""
REFILL_S: Final = 60.0
MAX_TEXT: Final = 1500
MAX_TOGETHER: Final = 6000
"""Characters of all messages that become one."""
LEVELS: Final = ("info", "warning", "error")

_PAIRS: Final = {"source_recovered": "source_lost", "network_back": "network_lost", "guard_ended": "guard_started"}
_REPORTED_ELSEWHERE: Final = frozenset(
    {"outage_continued", "phase_changed", "grade_lowered", "power_off_ordered", "power_off_accepted", "battery_low"}
    | {"trainer_signalled", "reboot_ordered"}
)
"""Warnings that are steps of an outage, which its own messages cover."""
_WHOSE: Final = ("ups", "source", "trainer", "method", "action", "drill")
WATCHED: Final = frozenset(
    {"journal_in_memory", "history_lost", "no_power_off", "policy_unverified", "settings_rejected"}
    | {"trainer_stranger", "source_troubled", "messages_at_risk", "table_contradicted", "undersized"}
)
"""Reasons of `readiness` for which the core has no note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. key: the trouble or the outage that it belongs to; status: begin or end of that, or event.

    at: Unix seconds. story: part of an outage, so every target gets it.
    """

    id: str
    at: float
    key: str
    status: str
    event: str
    level: str
    host: str
    title: str
    text: str
    outage: str = ""
    because: str = ""
    mode: str = ""
    story: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it, for the queue and for programs."""
        return {"schema_version": 1, "object": "message", **asdict(self)}


def message_of(plain: Mapping[str, Any]) -> Message:
    """Return the message that `plain` made. Raises ValueError, TypeError."""
    known = {each.name: plain[each.name] for each in fields(Message) if each.name in plain}
    made = Message(**known)
    are_texts = all(isinstance(getattr(made, each.name), str) for each in fields(Message) if each.type is str)
    if not (are_texts and is_moment(made.at) and made.level in LEVELS and isinstance(made.numbers, Mapping)):
        msg = "no message"
        raise ValueError(msg)
    return made


def is_moment(value: object) -> bool:
    """Say whether a value is Unix seconds that can be shown as a date."""
    return isinstance(value, int | float) and 0 <= value < _LATEST_S


_LATEST_S: Final = 1e11


@dataclass(frozen=True, slots=True)
class StepNotes:
    """The notes of one step, as the loop hands them over. before: the state that they were answered in."""

    notes: tuple[Note, ...]
    before: State
    outage: str
    mode: str
    wall: float


class _Bucket:
    """Lets BURST pass at once, and then one each REFILL_S."""

    def __init__(self) -> None:
        self._tokens, self._at = float(BURST), 0.0

    def take(self, wall: float) -> bool:
        self._tokens = min(float(BURST), self._tokens + max(0.0, wall - self._at) / REFILL_S)
        self._at = wall
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class MessageComposer:
    """Turns what happens into messages. `standing`: what has begun and not ended; `said`: when each was last sent.

    `muted`: what has begun within an hour of the last message about it, and is sent when that is over.
    """

    def __init__(self, host: str, language: str = "en", wall: Callable[[], float] = time.time) -> None:  # noqa: TID251 - messages are for people
        self.host = host
        self.language = language
        self.standing: dict[str, Message] = {}
        self.said: dict[str, float] = {}
        self.over: set[str] = set()
        """Outages, and power-offs of them, whose end this daemon has reported."""
        self._wall = wall
        self.muted: dict[str, Message] = {}
        self._buckets = {True: _Bucket(), False: _Bucket()}
        self.left_out: Counter[str] = Counter()
        self._number = 0

    # --- From the core ------------------------------------------------------------------------------------------------

    def of_step(self, heard: StepNotes) -> list[Message]:
        """Return the messages of one step."""
        messages: list[Message] = []
        # The sums of a move are in its own note.
        sums = next((dict(note.numbers) for note in heard.notes if note.event == "phase_changed"), {})
        for note in heard.notes:
            messages += self._of_note(note, heard, sums)
        return messages

    def _of_note(self, note: Note, heard: StepNotes, sums: Mapping[str, Any]) -> list[Message]:
        numbers = dict(note.numbers)
        stage = _stage(note, numbers, heard.mode)
        if stage is not None:
            name, status = stage
            if name == "utility_failed_again":  # It may come and go for as long as the battery is charged.
                key = f"event:{name}:{heard.outage}"
                if self._was_said(key, heard.wall):
                    return []
                self.said[key] = heard.wall
            return self._story(name, status, note, heard, {**sums, **numbers} if name == "outage_began" else numbers)
        if note.event == "trainer_gone" and _was_asked(heard.before, str(numbers.get("trainer"))):
            return []
        if note.event.endswith("_cleared"):
            return self.end(f"alarm:{note.event.removesuffix('_cleared')}", note.because, heard.wall)
        if note.event in _PAIRS:
            return self.end(_pair_key(_PAIRS[note.event], numbers), note.because, heard.wall)
        if note.level not in (Level.WARNING, Level.ERROR) or note.event in _REPORTED_ELSEWHERE:
            return []
        key, status = self._key(note.event, numbers, heard.outage)
        made = self._make(
            note.event, key, status, level=str(note.level), because=note.because, at=heard, numbers=numbers
        )
        return self._once(made)

    def _key(self, event: str, numbers: Mapping[str, Any], outage: str) -> tuple[str, str]:
        if event.endswith("_raised"):
            return f"alarm:{event.removesuffix('_raised')}", "begin"
        if event in _PAIRS.values():
            return _pair_key(event, numbers), "begin"
        whose = (str(numbers[each]) for each in _WHOSE if numbers.get(each))
        within = [outage] if outage else []  # The same in the next outage is another trouble.
        return ":".join(["event", event, *within, *whose])[:200], "event"

    def _story(self, name: str, status: str, note: Note, heard: StepNotes, numbers: Mapping[str, Any]) -> list[Message]:
        """Return a message of an outage, which every target gets. A power-off is a trouble of its own within it."""
        what = "power_off" if name in ("shutdown", "host_returned") else "outage"
        outage = str(numbers.get("outage") or heard.outage)
        bad = name in ("shutdown", "dirty") or note.level is Level.ERROR or _is_without_training(name, heard.notes)
        level = "error" if bad else "info" if status == "end" else "warning"
        key = f"{what}:{outage}"
        made = self._make(name, key, status, level=level, because=note.because, at=heard, numbers=numbers)
        made = replace(made, story=True, outage=outage)
        if status == "begin":
            self.standing[key] = made
            self.over.discard(key)
        elif status == "end":
            self.standing.pop(key, None)
            self.over.add(key)
        weighty = what == "power_off" or name in ("clean_shutdown", "dirty")
        return [made] if weighty or self._passes(made) else []

    # --- From the daemon ----------------------------------------------------------------------------------------------

    def watch(
        self, reasons: Mapping[str, tuple[str, str]], state: State, mode: str, *, is_whole: bool = True
    ) -> list[Message]:
        """Compare with what stands now. reasons: level and text by name, or NAME:WHOSE. Called once a minute.

        is_whole: False while the journal may still give back an outage that the state does not have.
        """
        now = StepNotes((), state, "", mode, self._wall())
        wall = now.wall
        messages: list[Message] = []
        for name, (level, because) in reasons.items():
            if f"reason:{name}" not in self.standing and f"reason:{name}" not in self.muted:
                event = name.partition(":")[0]
                messages += self._once(
                    self._make(event, f"reason:{name}", "begin", level=level, because=because, at=now)
                )
        open_outage = "" if isinstance(state.phase, Online) else state.phase.outage.id
        still = {f"alarm:{name}" for name in state.alarms} | {f"reason:{name}" for name in reasons}
        still |= {f"outage:{open_outage}"} | (
            {f"power_off:{open_outage}"} if isinstance(state.phase, Shutdown) else set()
        )
        for key, began in [*self.standing.items(), *self.muted.items()]:
            if began.story and not is_whole:
                continue
            if not (_is_open(began, state) if key.startswith("pair:") else key in still):
                messages += self.end(key, "", wall)
        for key, began in list(self.muted.items()):
            if not self._was_said(key, wall):
                del self.muted[key]
                messages += self._late(began, wall)
        return [*messages, *self._sum_up(now)]

    def _late(self, began: Message, wall: float) -> list[Message]:
        """Return the beginning of a trouble that was held back, with the time of it; not if the clock was set since."""
        since = began.at if 0.0 <= wall - began.at < 2 * AGAIN_S else wall
        found = [replace(each, at=since) for each in self._once(replace(began, at=wall))]
        self.standing |= {each.key: each for each in found}
        return found

    def end(self, key: str, because: str, wall: float) -> list[Message]:
        """Return the message that a trouble is over, if its beginning was sent."""
        self.muted.pop(key, None)
        began = self.standing.pop(key, None)
        if began is None:
            return []
        kind, _, rest = key.partition(":")
        event, _, whose = rest.partition(":")
        name = named(self.language, kind if began.story else event)
        over = f"{whose}: it does not stand any more" if whose and kind == "reason" else "it does not stand any more"
        values = {"host": self.host, "name": name, "because": because or over}
        title, text = worded(self.language, "outage_over" if kind == "outage" else "over", values)
        made = replace(began, id=self._id(wall), at=wall, status="end", title=title, text=text, because=because)
        return [made] if self._passes(made) else []

    def test(self, mode: str) -> Message:
        """Return a message that says nothing but that it arrives."""
        now = StepNotes((), State(), "", mode, self._wall())
        return self._make("test", "event:test", "event", level="info", because="", at=now)

    # --- What all of them share ---------------------------------------------------------------------------------------

    def _make(
        self,
        name: str,
        key: str,
        status: str,
        *,
        level: str,
        because: str,
        at: StepNotes,
        numbers: Mapping[str, Any] = MappingProxyType({}),
    ) -> Message:
        because = clean_text(because, 600)
        own = {
            each: clean_text(value, 200) if isinstance(value, str) else value
            for each, value in numbers.items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        needs = [own.get(each) for each in ("checkpoint_s", "stop_s")]
        called = named(self.language, name, str(own.get("action", "")))
        values = {**own, "host": self.host, "because": because.rstrip("."), "name": called}
        values["need_s"] = sum(float(each) for each in needs if isinstance(each, int | float)) if any(needs) else None
        values["fix"] = FIXES.get(name.removesuffix("_raised"), "")
        title, text = worded(self.language, _kind(name, own, at), values)
        if at.mode in ("dry-run", "rehearse") and name in (*_PROMISES, "shutdown"):
            text = f"{text} {worded(self.language, at.mode, {})[1]}"
        elif at.before.maintenance is not None and name in _PROMISES:
            text = f"{text} {worded(self.language, 'maintenance', {})[1]}"
        return Message(
            id=self._id(at.wall),
            at=round(at.wall, 3),
            key=key,
            status=status,
            event=name,
            level=level,
            host=self.host,
            title=title[:200],
            text=text[:MAX_TEXT],
            outage=at.outage,
            because=because,
            mode=at.mode,
            numbers=own,
        )

    def _id(self, wall: float) -> str:
        self._number += 1
        return f"{int(wall * 1000):x}-{self._number}"

    def _once(self, made: Message) -> list[Message]:
        """Return it, unless the same trouble was sent in the last hour; one that stands is then sent later."""
        if self._was_said(made.key, made.at):
            if made.status == "begin":
                self.muted[made.key] = made
            return []
        if not self._passes(made):
            return []
        self.said = {key: at for key, at in self.said.items() if self._was_said(key, made.at)}
        self.said[made.key] = made.at
        if made.status == "begin":
            self.standing[made.key] = made
        return [made]

    def _was_said(self, key: str, wall: float) -> bool:
        """Return whether it was sent in the last hour; a clock that was set back counts as another day."""
        return key in self.said and 0.0 <= wall - self.said[key] < AGAIN_S

    def _passes(self, made: Message) -> bool:
        if self._buckets[made.story].take(made.at):
            return True
        self.left_out[made.event] += 1
        return False

    def _sum_up(self, now: StepNotes) -> list[Message]:
        if not self.left_out:
            return []
        most = ", ".join(f"{named(self.language, name)} ({count})" for name, count in self.left_out.most_common(5))
        count = {"count": self.left_out.total()}
        self.left_out.clear()
        return [self._make("left_out", "event:left_out", "event", level="error", because=most, at=now, numbers=count)]


_WORDED: Final = frozenset(
    {"outage_began", "emergency_checkpoint", "shutdown", "host_returned", "ridden_through", "resumed_in_place"}
    | {"shutdown_aborted", "abort_ended", "utility_failed_again"}
    | {"clean_shutdown", "dirty", "rehearsed", "trainer_gone", "source_lost", "drill_overdue", "left_out", "test"}
)


_PROMISES: Final = ("outage_began", "emergency_checkpoint", "utility_failed_again")
"""Messages that say that the host will be powered off."""


def _stage(note: Note, numbers: Mapping[str, Any], mode: str) -> tuple[str, str] | None:
    """Return name and status of the outage's message that a note is, None if it is none."""
    match note.event:
        case "outage_began":
            return "outage_began", "begin"
        case "phase_changed" if numbers.get("new") == "emergency_checkpoint":
            return "emergency_checkpoint", "event"
        case "phase_changed" if numbers.get("cause") == Cause.ABORTED:
            return "shutdown_aborted", "event"
        case "phase_changed" if numbers.get("new") == "shutdown":
            # One that is only recorded begins nothing, so it needs no end of its own.
            return "shutdown", "begin" if mode == "armed" else "event"
        case "shutdown_aborted" | "abort_ended" | "utility_failed_again":
            return note.event, "event"
        case "host_returned":
            return "host_returned", "end"
        case "outage_ended":
            return str(numbers.get("outcome")), "end"
        case _:
            return None


def _pair_key(event: str, numbers: Mapping[str, Any]) -> str:
    whose = (str(numbers[each]) for each in ("ups", "source", "part") if numbers.get(each))
    return ":".join(["pair", event, *whose])[:200]


def _is_open(began: Message, state: State) -> bool:
    """Return whether the beginning of a pair still holds: a reboot leaves no note of its end."""
    if began.event == "guard_started":
        return state.guarded_since_s is not None
    if began.event == "network_lost":
        return any(each.part == began.numbers.get("part") for each in state.gone)
    known = feeds.of(state, str(began.numbers.get("ups")))
    if known is None and state.upses:  # not in the settings any more
        return False
    feed = state.feed if known is None else known.feed
    return fusion.lost_since_s(feed, str(began.numbers.get("source"))) is not None


def _was_asked(state: State, name: str) -> bool:
    """Return whether a trainer that is gone was asked to exit: by its own conduct, or with the whole host."""
    is_ordered = any(
        each.name == name and each.pause_ordered and each.conduct is Conduct.EXIT for each in state.trainers
    )
    return is_ordered or isinstance(state.phase, Shutdown)


def _is_without_training(name: str, notes: Iterable[Note]) -> bool:
    """Return whether an outage ends with the host back, but training that could not be started or is not seen."""
    lacks = any(
        each.event in ("resume_failed", "resume_unconfirmed")
        or (each.event == "outage_ended" and each.because == FAILED_AGAIN)
        for each in notes
    )
    return name in ("clean_shutdown", "dirty") and lacks


def _kind(name: str, numbers: Mapping[str, Any], at: StepNotes) -> str:
    """Return under which name the texts have a message."""
    match name, numbers.get("cause"):
        case "outage_began", Cause.POWER_OFF_ORDERED:
            return "cut_ordered"  # Utility may be there.
        case "outage_began", Cause.CALIBRATION_LOW:
            return "calibration_low"
        case "emergency_checkpoint", _ if numbers.get("cut_in_s") is not None:
            return "checkpoint_before_cut"  # It permits no hold.
        case "shutdown", _ if at.mode != "armed":
            return "shutdown_recorded"
        case _ if _is_without_training(name, at.notes):
            return "not_resumed"
        case _:
            return name if name in _WORDED else "alarm"


def is_wanted(message: Message, alarms: str) -> bool:
    """Say whether a target gets it. alarms: of its settings."""
    return message.story or (alarms != "none" and LEVELS.index(message.level) >= LEVELS.index(alarms))


def composed(messages: Iterable[Message], language: str, wall: float, late_s: float) -> Message:
    """Return what is delivered for one message, or for all of an outage that come late."""
    every = list(messages)
    last = every[-1]
    if len(every) > 1:
        lines = "\n".join(_line(each) for each in every)
        span = {"first": _clock(every[0].at), "last": _clock(last.at)}
        title, text = worded(language, "together", {"title": last.title, "text": lines, **span})
        level = max((each.level for each in every), key=LEVELS.index)
        return replace(last, title=title, text=text, level=level)
    if wall - last.at >= late_s:
        title, text = worded(language, "late", {"title": last.title, "text": last.text, "at": _clock(last.at)})
        return replace(last, title=title, text=text)
    return last


def fitting(waiting: Iterable[tuple[int, Message]]) -> list[tuple[int, Message]]:
    """Return the first of these, as many as one message holds: at least one."""
    found: list[tuple[int, Message]] = []
    left = MAX_TOGETHER
    for seq, message in waiting:
        left -= len(_line(message)) + 1
        if found and left < 0:
            break
        found.append((seq, message))
    return found


def _line(message: Message) -> str:
    return f"{_clock(message.at)} {message.title}: {message.text}"


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall))


def reason_levels(found: Iterable[Any], strangers: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Return level and text of the reasons that are worth a message, by name and what each is of.

    strangers: each "SOCKET: why"; of the first few each is a trouble of its own.
    """
    levels: dict[str, tuple[str, str]] = {}
    for each in found:
        if each.name == "trainer_stranger":
            for stranger in islice(strangers, MOST_STRANGERS):
                whose = stranger.partition(": ")[0]
                levels[f"{each.name}:{whose}"[:_LONGEST_KEY]] = ("warning", f"{WARNINGS[each.name]} ({stranger})")
        elif each.name in WATCHED:
            whose = dict(each.numbers).get("source", "")
            key = f"{each.name}:{whose}"[:_LONGEST_KEY] if whose else each.name
            levels[key] = ("error" if each.name in ERRORS else "warning", f"{each.text}")
    return levels


_LONGEST_KEY: Final = 190
MOST_STRANGERS: Final = 3
"""A user who makes sockets by the thousand must not use up the messages of others."""


# --- Texts ----------------------------------------------------------------------------------------------------
#
# Title and text of a message in the language of the settings, from texts/*.yaml.

TEXTS_FOLDER: Final = Path(__file__).with_name("texts")
_LONGEST_S: Final = 90 * 86400.0
Texts = Mapping[str, Any]


@cache
def texts(language: str) -> Texts:
    """Return the texts of a language: `messages`, `reasons`, `alarms` and `units`."""
    loaded: Texts = load_file(TEXTS_FOLDER / f"{language}.yaml").data
    return loaded


def worded(language: str, name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return title and text of a message. A value that is missing or None is shown as unknown."""
    known = texts(language)
    message = known["messages"][name]
    shown = _Values({key: _shown(known, key, value) for key, value in values.items()})
    shown.unknown = known["units"]["unknown"]
    return message["title"].format_map(shown), message["text"].format_map(shown).strip()


def named(language: str, event: str, action: str = "") -> str:
    """Return what an alarm is called. action: the class of the order that failed, if one did."""
    name = event.removesuffix("_raised").removesuffix("_cleared").replace("_", " ")
    alarms = texts(language)["alarms"]
    return str(alarms.get(f"{name} {action}") or alarms.get(name, name))


class _Values(dict[str, str]):
    """Values of a text; what is not there is unknown."""

    unknown: str

    def __missing__(self, key: str) -> str:
        return self.unknown


def _shown(known: Texts, key: str, value: object) -> str:
    units = known["units"]
    if value is None:
        return str(units["unknown"])
    if key == "because":
        return str(known["reasons"].get(str(value), value))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if not key.endswith("_s"):
        return f"{value:.0f}"
    if not 0 <= value < _LONGEST_S:
        return str(units["unknown"])
    whole = round(value)
    if whole < 60:
        return f"{whole} {units['seconds']}"
    if whole < 600:  # Runtime and needs are compared: 2 min must not stand for 105 s and for 149 s.
        return f"{whole // 60} {units['minutes']} {whole % 60} {units['seconds']}"
    return f"{value / 60:.0f} {units['minutes']}" if value < 6000 else f"{value / 3600:.1f} {units['hours']}"
