"""What an operator reads before a drill: each refusal and each line of the outline, word for word."""

from dataclasses import replace

import pytest

from powerguard.core.drill import checks
from powerguard.core.model.actions import Conduct
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.state import Battery, Feed, State, Supply, Trainer
from tests.core.play import Player, make_policy
from tests.golden import Golden

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20"
FULL = "utility load=75 charge=100 runtime=360"
READY = f"100..114 {FULL}\n115 trainer llm step=100 durable_age_s=60"
TWO = f"{WORDS} trainer=vit:pause:20"
RECENT = "115 trainer llm durable_age_s=60\n115 trainer vit"


def why(story: str, scope: str = "policy", words: str = WORDS, witness: str = "simulated") -> str:
    """Why such a drill may not begin at the end of that story."""
    player = Player()
    result = player.play(f"policy {words}\nauto policy\n{story}")
    scopes = tuple(scope.split(",")) if scope else ()
    return checks.refusal(player.policy, result.state, player.last_s, scopes, witness)


REFUSALS = [
    ("no reading", "100 tick", "policy", WORDS),
    ("a reading of battery", f"{READY}\n115 battery load=75 charge=100", "policy", WORDS),
    ("a self-test", f"{READY}\n115 utility load=75 charge=100 testing", "policy", WORDS),
    ("utility is new", f"100..103 {FULL}", "policy", WORDS),
    (
        "no time, no charge",
        "100..114 utility load=75",
        "policy",
        "table=50:540,75:360,100:240 trainer=llm:pause:2000",
    ),
    ("a low charge", "100..114 utility charge=30", "policy", "trainer=llm:pause:20"),
    ("no trainer", f"{READY}\n115 trainer llm alive=false", "pause", WORDS),
    (
        "trainers that continue",
        f"{READY}\n115 trainer llm conduct=continue\n115 trainer vit conduct=continue",
        "pause",
        TWO,
    ),
    ("no checkpoint", f"{READY}\n{RECENT}", "pause", TWO),
    ("an old checkpoint", READY.replace("age_s=60", "age_s=1900"), "cap", f"{WORDS} cap_share=0.7"),
    ("no BMC", READY, "policy", f"{WORDS} bmc=0"),
    ("an unknown scope", READY, "full,lunch", WORDS),
    ("a boot without id", READY, "policy", f"{WORDS} boot_id="),
]


@pytest.mark.parametrize(("case", "story", "scope", "words"), REFUSALS, ids=[case for case, *_ in REFUSALS])
def test_a_refusal_reads(golden: Golden, case: str, story: str, scope: str, words: str) -> None:
    """What is wrong, with its numbers, and the fix."""
    golden("drill", why(story, scope, words), case)


def test_an_unknown_witness_is_refused_with_the_known_ones(golden: Golden) -> None:
    golden("drill", why(READY, "", witness="magic"))


def test_a_cap_that_stands_is_reported() -> None:
    player = Player()
    player.play(f"policy {WORDS} cap_share=0.7\n{READY}\n115 learned cap=75:50:0.9\n116..127 battery load=75 charge=99")
    result = player.play(f"128..140 {FULL}")
    said = checks.refusal(player.policy, result.state, player.last_s, ("policy",), "simulated")
    assert said == "GPU power is capped: wait until the limits are restored"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"test_since_s": 12.0}, "the UPS tests its battery: wait until the test has ended"),
        ({"countdown_at_s": 500.0}, "a countdown of the UPS to output off is running: cancel it first"),
    ],
)
def test_what_the_ups_has_begun_by_itself_is_waited_for(fields: dict[str, float], said: str) -> None:
    """Its newest reading may well say utility: the charge is not settled, or the output is about to be cut."""
    reading = Reading(at_s=20.0, ups="ups", source="s", output_source=OutputSource.UTILITY, charge_pct=100.0)
    state = State(
        feed=Feed(supply=Supply.UTILITY, reading=reading, utility_seen=True, **fields),  # type: ignore[arg-type]
        battery=Battery(at_s=20.0, left=0.75),
    )
    assert checks.refusal(make_policy(WORDS.split()), state, 20.0, ("policy",), "simulated") == said


def test_of_a_checkpoint_that_is_being_written_only_the_rest_counts() -> None:
    """On 80 % of the charge 155 s and a bare stop are too much; with most of it behind, they are survived."""
    words = "table=50:540,75:360,100:240 trainer=llm:continue:155"
    begun = "100..114 utility load=75 charge=80\n115 trainer llm conduct=continue\n115 checkpoint_now"
    assert "checkpoint and stop need 165 s of 119 s" in why(begun, words=words)
    slow = f"{begun}\n115 progress llm eta=135\n116..120 utility load=75 charge=80"
    assert "checkpoint and stop need 140 s of 119 s" in why(slow, words=words)
    almost = f"{begun}\n115 progress llm eta=10\n116..120 utility load=75 charge=80"
    assert why(almost, words=words) == ""


def test_with_nobody_alive_the_policy_can_still_be_drilled() -> None:
    """A host that trains nothing just now: the BMC's word is worth a rehearsal all the same."""
    assert why(f"{READY}\n115 trainer llm alive=false", "policy") == ""


# --- The outline ------------------------------------------------------------------------------------------------------


def outline(scope: str, *, witness: str = "simulated", trainers: tuple[Trainer, ...], words: str = WORDS) -> list[str]:
    """The lines as (stage: what, at most so long)."""
    scopes = tuple(scope.split(",")) if scope else ()
    lines = checks.outline(make_policy(words.split()), State(trainers=trainers), scopes, witness)
    return [f"{stage}: {what} ({limit_s:g} s)" for stage, what, limit_s in lines]


LLM = Trainer(name="llm", conduct=Conduct.PAUSE, checkpoint_s=20.0)
VIT = Trainer(name="vit", conduct=Conduct.PAUSE, checkpoint_s=30.0)


def test_the_outline_of_a_full_drill_reads(golden: Golden) -> None:
    """An operator who confirms this knows what happens to the training, and how long at most."""
    golden("drill", "\n".join(outline("full", trainers=(LLM, VIT), words=f"{WORDS} cap_share=0.7")))
    assert outline("full", trainers=(LLM,), words=f"{WORDS} bmc=0")[-1] == (
        "policy: left out: the settings have no BMC (0 s)"
    )


def test_the_outline_names_trainers_that_continue_and_stages_left_out(golden: Golden) -> None:
    beside = replace(VIT, conduct=Conduct.CONTINUE)
    golden("drill", "\n".join(outline("checkpoint", trainers=(LLM, beside))), "checkpoint")
    golden("drill", "\n".join(outline("pause", trainers=(LLM, beside))), "pause")
    golden("drill", "\n".join(outline("checkpoint,pause", trainers=())), "no trainer")
    golden("drill", "\n".join(outline("full", trainers=())), "no trainer, full")


def test_the_outline_of_a_real_witness_reads(golden: Golden) -> None:
    """The plug ends in a real power-off: that must not be overlooked."""
    golden("drill", "\n".join(outline("", witness="plug", trainers=(LLM,))), "plug")
    golden("drill", "\n".join(outline("", witness="self_test", trainers=(LLM,))), "self-test")


def test_the_speed_before_a_cap_is_watched_for_as_long_as_slow_steps_need() -> None:
    """Eight steps of 10 s, and some: the outline says so too."""
    slow = replace(LLM, step_s=10.0)
    result = outline("cap", trainers=(slow,), words=f"{WORDS} cap_share=0.7")
    assert result[0].startswith("baseline: ")
    assert result[0].endswith("(90 s)")
