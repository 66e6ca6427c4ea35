"""Whatever the core can say has words that an operator understands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.cli.words import NEED_SHARE, ORDERS, PHASES, WITNESSES, has_words, mark, order, sentence
from powerguard.core.decide.transitions import TABLE
from powerguard.core.model.actions import KINDS, Note
from powerguard.core.model.state import phase_name
from tests.core.play import Player
from tests.golden import Golden

ROOT = Path(__file__).parents[2]


def said_in(path: Path) -> Iterator[str]:
    """Every note's name that stands in a file of the core: `note("...")`, `set_alarm("...")`, a yielded alarm."""
    constants: dict[str, str] = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                constants[target.id] = str(node.value.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            first = node.value.elts[0]
            yield f"{first.value if isinstance(first, ast.Constant) else constants.get(ast.unparse(first))}_raised"
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name not in ("note", "set_alarm"):
            continue
        first = node.args[0]
        branches = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
        for branch in branches:
            if isinstance(branch, ast.Constant):
                text = str(branch.value)
            elif isinstance(branch, ast.Name) and branch.id in constants:
                text = constants[branch.id]
            else:
                continue
            yield f"{text}_raised" if name == "set_alarm" else text


def test_every_note_of_the_core_has_words() -> None:
    """A note that is added is told by `explain` and `replay` from its first day."""
    said = {event for path in (ROOT / "powerguard" / "core").rglob("*.py") for event in said_in(path)}
    assert len(said) > 40, "the finder finds"
    assert {"phase_changed", "outage_began", "overload_raised", "maintenance_set", "maintenance_ended"} <= said
    wordless = sorted(event for event in said if not has_words(event))
    assert wordless == [], "each note needs a sentence in powerguard/cli/words.py"


UNKNOWN = {"phase_changed", "outage_began", "battery_low", "commit_withdrawn"}
"""Of a UPS that reports nothing: "?" is what is known."""


def check_words(note: Note) -> None:
    """Expect a sentence in every mode: nothing missing, no word of the machine's own. `test_scenario` calls it."""
    assert has_words(note.event), note
    text = sentence_of(note)
    assert "?" not in text or note.event in UNKNOWN, text
    assert len(text.split()) >= 3, text
    for mode in (None, "dry-run", "rehearse"):
        text = sentence(note.event, note.because, dict(note.numbers), mode)
        assert not re.search(r"\bNone\b|\bnan\b|<|_s\b", text.replace("blind_s", "")), text


def sentence_of(note: Note) -> str:
    return sentence(note.event, note.because, dict(note.numbers))


def test_only_a_shutdown_of_the_host_is_said_to_arm_anything() -> None:
    """Of a daemon that is stopped alone nothing is armed, and a person must not rely on it."""
    of_host = sentence("foreign_stop_seen", "another program shuts the host down", {})
    of_daemon = sentence("foreign_stop_seen", "the daemon is being stopped", {})
    assert ("are armed" in of_host, "armed" in of_daemon) == (True, False)
    assert "until it runs again" in of_daemon


def test_orders_and_phases_have_words(golden: Golden) -> None:
    assert len({kind.word for kind in KINDS}) == len(KINDS), "two kinds of action (core/model/actions.py) have one word"
    assert {phase_name(phase) for phase, _ in TABLE} | {phase_name(phase) for phase in TABLE.values()} <= set(PHASES)
    golden("words", "\n".join(order(action, "llm") for action in sorted(ORDERS)), "orders")
    golden(
        "words", "\n".join([*(mark("phase", phase) for phase in sorted(PHASES)), mark("order", "PowerOff")]), "marks"
    )


NUMBERS = {
    "old": "on_battery",
    "new": "emergency_checkpoint",
    "cause": "checkpoint needed",
    "reff_now_s": 152.3,
    "reff_paused_s": 252.6,
    "checkpoint_s": 20.0,
    "stop_s": 170.0,
    "grade": "full",
    "cut_in_s": None,
}
SENTENCES = [
    ("budget", {}, "a checkpoint was due, because three quarters of the runtime with training paused"),
    ("budget", {}, "(4 m 13 s, so 3 m 09 s) had fallen to the needs (checkpoint 20 s + stop 2 m 50 s)"),
    ("budget", {"shed_s": 110.0}, "(checkpoint 20 s + stop 2 m 50 s + 1 m 50 s for higher tiers)"),
    (
        "budget",
        {"new": "shutdown", "reff_s": 280.0, "shed_s": 110.0},
        "only 4 m 40 s more, and a full stop takes 2 m 50 s + 1 m 50 s for higher tiers",
    ),
    ("runtime_short", {}, "at this load the battery would have lasted only 2 m 32 s more"),
    ("low_battery", {}, "because the UPS reports a low battery"),
    ("blind", {}, "because the runtime is unknown: neither the UPS nor the settings have it"),
    (
        "power_off_at",
        {"cut_in_s": 95.0},
        "the UPS is going to cut its output in 1 m 35 s",
    ),
    ("fsd", {}, "a forced shutdown (FSD) was ordered at the UPS"),
    (
        "budget",
        {"new": "shutdown", "reff_s": 168.0},
        "the battery lasts only 2 m 48 s more, and a full stop takes 2 m 50 s",
    ),
    (
        "budget",  # the UPS's load has not fallen yet: at that load it is 30 s
        {"new": "shutdown", "reff_s": 168.0, "reff_now_s": 30.0},
        "at the expected load the battery lasts only 2 m 48 s more",
    ),
    ("budget", {"new": "shutdown", "reff_s": 168.0, "reff_now_s": 168.0}, "at this load the battery lasts only"),
    ("power_off_at permits no hold", {"new": "shutdown"}, "no time to wait for utility"),
    ("blind: blind_s", {"new": "shutdown"}, "the time that the settings allow (blind_s) is over"),
    ("second_reading", {"old": "online", "new": "on_battery"}, "a second reading confirms it. It lasts 2 m 32 s more"),
    ("alice: a test", {"old": "holding", "new": "on_battery"}, "the shutdown was aborted (alice: a test)"),
    (
        "every checkpoint is durable",
        {"new": "holding"},
        "at the expected load the battery lasts 4 m 13 s more, of which the stop needs 2 m 50 s",
    ),
    ("x", {"new": "online", "cause": "utility back"}, "the outage is over: x"),
    (
        "utility stable for 10 s",
        {"new": "online", "cause": "utility stable"},
        "the outage is over, and the host was not powered off",
    ),
    ("something new", {"new": "shutdown"}, "because something new"),
]


def test_a_drill_that_an_outage_ended_is_reported_as_the_outage_is(golden: Golden) -> None:
    numbers = {"result": "interrupted", "lasted_s": 15.0}
    text = sentence("drill_ended", "a real outage: on_battery_s", numbers)
    golden("words", text)


@pytest.mark.parametrize(("because", "numbers", "expected"), SENTENCES)
def test_a_phase_is_reported_with_the_numbers_that_decided(
    because: str, numbers: dict[str, object], expected: str
) -> None:
    assert expected in sentence("phase_changed", because, NUMBERS | numbers)


NODE = {"node": "gpu1", "state": "DRAIN+IDLE", "jobs": "12", "refused": 0, "because": ""}


@pytest.mark.parametrize(
    ("event", "numbers", "expected"),
    [
        ("node_left", {"did": "down", "state": "DOWN"}, "job 12 requeued, node gpu1 (DOWN) is down"),
        (
            "node_left",
            {"did": "not_ours", "reason": "bad disk"},
            "job 12 requeued, node gpu1 (DRAIN+IDLE) was left as it is",
        ),
        (
            "node_kept",
            {"reason": "bad disk"},
            "node gpu1 (DRAIN+IDLE) was left as it is: others have marked it: bad disk",
        ),
        ("node_kept", {}, "powerguard's mark stays on the node"),
    ],
)
def test_a_node_that_others_have_marked_is_not_reported_as_down(
    event: str, numbers: dict[str, object], expected: str
) -> None:
    assert sentence(event, "powerguard's mark stays on the node", NODE | numbers) == expected


@pytest.mark.parametrize(
    ("event", "numbers", "rehearse", "dry_run"),
    [
        (
            "phase_changed",
            NUMBERS | {"new": "shutdown"},
            "the host would be powered off",
            "the host would be powered off",
        ),
        ("power_off_accepted", {}, "recorded, but not done", "recorded, but not done"),
        ("phase_changed", NUMBERS, "a checkpoint was due", "a checkpoint was due"),
        ("phase_changed", NUMBERS | {"new": "holding"}, "The host waits for utility", "no trainer was asked"),
        ("checkpoint_durable", {"trainer": "llm"}, "the checkpoint of llm is durable", "no checkpoint of llm"),
        ("gpu_power_capped", {}, "GPU power is lowered (x)", "dry-run, only recorded: GPU power is lowered (x)"),
        ("power_on_armed", {"method": "rtc"}, "rehearse, only recorded: armed", "dry-run, only recorded: armed"),
        ("outage_ended", {"outcome": "resumed_in_place"}, "held and resumed in place", "would have been held"),
    ],
)
def test_what_was_only_recorded_is_not_reported_as_done(
    event: str, numbers: dict[str, object], rehearse: str, dry_run: str
) -> None:
    """In dry-run nothing is done; in rehearse everything but what would take the host's power."""
    assert rehearse in sentence(event, "x", numbers, "rehearse")
    assert dry_run in sentence(event, "x", numbers, "dry-run")
    assert sentence(event, "x", numbers, "armed") == sentence(event, "x", numbers)


def test_the_share_is_the_core_s_own() -> None:
    """What is told of three quarters is where the core draws the line: within a second of battery."""
    story = (ROOT / "tests" / "scenarios" / "long-outage.txt").read_text(encoding="utf-8").partition("\n----\n")[0]
    (note,) = (each for each in Player().play(story).notes if dict(each.numbers).get("new") == "emergency_checkpoint")
    numbers = {name: value for name, value in note.numbers if isinstance(value, float)}
    need_s = numbers["checkpoint_s"] + numbers["stop_s"]
    assert note.because == "budget"
    assert need_s - 2.0 < NEED_SHARE * numbers["reff_paused_s"] <= need_s


def test_what_has_no_words_is_reported_by_its_name(golden: Golden) -> None:
    """A journal of a newer version."""
    assert not has_words("moon_rose")
    sentences = [sentence(event, "it was time", {}) for event in ("moon_rose", "moon_raised", "moon_cleared")]
    golden("words", "\n".join(sentences))


def test_witnesses_have_words() -> None:
    """Those that `core.supply` can name."""
    source = (ROOT / "powerguard" / "core" / "supply" / "fusion.py").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:return|witness =) "(\w+)"', source))
    assert {"second_source", "on_battery_s", "input_present", "alarms"} <= named <= set(WITNESSES)
