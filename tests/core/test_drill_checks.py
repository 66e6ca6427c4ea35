"""What an operator reads before a drill: each refusal and each line of the outline, word for word."""

from dataclasses import replace

import pytest

from powerguard.core.drill import checks
from powerguard.core.model.actions import Conduct
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.state import Battery, Feed, State, Supply, Trainer
from tests.core.play import Player, make_policy

WORDS = "table=50:540,75:360,100:240 trainer=llm:pause:20"
FULL = "utility load=75 charge=100 runtime=360"
READY = f"100..114 {FULL}\n115 trainer llm step=100 durable_age_s=60"
TWO = f"{WORDS} trainer=vit:pause:20"
RECENT = "115 trainer llm durable_age_s=60\n115 trainer vit"


def why(story: str, scope: str = "policy", words: str = WORDS, witness: str = "simulated") -> str:
    """Why such a drill may not begin at the end of that story."""
    player = Player()
    told = player.play(f"policy {words}\nauto policy\n{story}")
    scopes = tuple(scope.split(",")) if scope else ()
    return checks.refusal(player.policy, told.state, player.last_s, scopes, witness)


@pytest.mark.parametrize(
    ("story", "scope", "words", "said"),
    [
        ("100 tick", "policy", WORDS, "the UPS has not been read yet: wait for the first reading"),
        (
            f"{READY}\n115 battery load=75 charge=100",
            "policy",
            WORDS,
            "the newest reading says battery: wait until it is clear whether utility is there",
        ),
        (
            f"{READY}\n115 utility load=75 charge=100 testing",
            "policy",
            WORDS,
            "the UPS tests its battery: wait until it has ended",
        ),
        (
            f"100..103 {FULL}",
            "policy",
            WORDS,
            "utility has been there for 3 s only: it must be stable for 10 s",
        ),
        (
            "100..114 utility load=75",
            "policy",
            "table=50:540,75:360,100:240 trainer=llm:pause:2000",
            (
                "an outage in the drill could not be survived (charge not told; checkpoint and stop need 2010 s of "
                "123 s): wait until it has charged"
            ),
        ),
        (
            "100..114 utility charge=30",
            "policy",
            "trainer=llm:pause:20",
            "an outage in the drill could not be survived (charge 30 %): wait until it has charged",
        ),
        (
            f"{READY}\n115 trainer llm alive=false",
            "pause",
            WORDS,
            "no trainer is alive (see trainers in `powerguard status`): start training, or drill the policy alone",
        ),
        (
            f"{READY}\n115 trainer llm conduct=continue\n115 trainer vit conduct=continue",
            "pause",
            TWO,
            "llm, vit: goes on in an outage and cannot be paused: embed powerguard.trainer, or leave pause out",
        ),
        (
            f"{READY}\n{RECENT}",
            "pause",
            TWO,
            (
                "vit: no known checkpoint (at most 30 minutes): "
                "run `powerguard drill --scope checkpoint` first, which makes one"
            ),
        ),
        (
            READY.replace("age_s=60", "age_s=1900"),
            "cap",
            f"{WORDS} cap_share=0.7",
            (
                "llm: its checkpoint is 32 minutes old (at most 30 minutes): "
                "run `powerguard drill --scope checkpoint` first, which makes one"
            ),
        ),
        (READY, "full,lunch", WORDS, "no scope 'lunch' (of checkpoint, pause, cap, policy, full)"),
        (READY, "policy", f"{WORDS} boot_id=", "this boot has no id"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) and " " in value and "=" not in value else "",
)
def test_a_refusal_reads(story: str, scope: str, words: str, said: str) -> None:
    """What is wrong, with its numbers, and what would be right: the operator has nothing else to go by."""
    assert why(story, scope, words) == said


def test_a_word_that_is_no_witness_is_told_with_those_that_are() -> None:
    assert why(READY, "", witness="magic") == "no witness 'magic' (one of simulated, self_test, plug)"


def test_a_cap_that_stands_is_told() -> None:
    player = Player()
    player.play(f"policy {WORDS} cap_share=0.7\n{READY}\n115 learned cap=75:50:0.9\n116..127 battery load=75 charge=99")
    told = player.play(f"128..140 {FULL}")
    said = checks.refusal(player.policy, told.state, player.last_s, ("policy",), "simulated")
    assert said == "GPU power is capped: wait until the limits are restored"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"test_since_s": 12.0}, "the UPS tests its battery: wait until it has ended"),
        ({"countdown_at_s": 500.0}, "a countdown of the UPS to cut its output runs: cancel it first"),
    ],
)
def test_what_the_ups_has_begun_by_itself_is_waited_for(told: dict[str, float], said: str) -> None:
    """Its newest reading may well say utility: the charge is not settled, or the output is about to be cut."""
    reading = Reading(at_s=20.0, ups="ups", source="s", output_source=OutputSource.UTILITY, charge_pct=100.0)
    state = State(
        feed=Feed(supply=Supply.UTILITY, reading=reading, utility_seen=True, **told),  # type: ignore[arg-type]
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


def test_the_outline_of_a_full_drill_reads() -> None:
    """Whoever says yes to this knows what happens to the training, and how long at most."""
    assert outline("full", trainers=(LLM, VIT), words=f"{WORDS} cap_share=0.7") == [
        "baseline: watch load and training speed; nothing is changed (30 s)",
        "checkpoint: ask llm, vit for a checkpoint and to pause there (120 s)",
        "pause: keep llm, vit paused until the load has settled (45 s)",
        "resume: let llm, vit go on, and see that training runs (30 s)",
        "cap: lower every GPU's power limit to 70 %, measure load and speed (45 s)",
        "restore: restore every GPU's power limit (30 s)",
        "policy: make sure, by reading back, that the BMC powers the host on when power returns (5 s)",
        "sync: sync the checkpoint filesystems (5 s)",
        "record: write down the power-off that an outage would order; nothing is powered off (0 s)",
    ]


def test_the_outline_says_who_goes_on_and_what_is_left_out() -> None:
    beside = replace(VIT, conduct=Conduct.CONTINUE)
    assert outline("checkpoint", trainers=(LLM, beside)) == [
        "checkpoint: ask llm, vit for a checkpoint; training goes on (120 s)",
    ]
    assert outline("pause", trainers=(LLM, beside))[1] == "pause: keep llm paused until the load has settled (45 s)"
    assert outline("checkpoint,pause", trainers=()) == [
        "baseline: watch load and training speed; nothing is changed (30 s)",
        "checkpoint: ask nobody for a checkpoint and to pause there (0 s)",
        "pause: keep nobody paused until the load has settled (45 s)",
        "resume: let nobody go on, and see that training runs (30 s)",
    ]
    assert outline("full", trainers=())[-3:] == [
        "checkpoint: left out: no trainer is alive (0 s)",
        "pause: left out: no trainer is alive (0 s)",
        "cap: left out: the settings cap no GPU power (0 s)",
    ]


def test_the_outline_of_a_real_witness_reads() -> None:
    """The plug ends in a real power-off: that must not be overlooked."""
    assert outline("", witness="plug", trainers=(LLM,)) == [
        "plug: wait for you to pull the UPS's plug: from then on the real rules run, with the real power-off (120 s)",
    ]
    assert outline("", witness="self_test", trainers=(LLM,)) == [
        "self_test: wait for the UPS to begin a self-test (start it at the UPS), measure load and runtime (120 s)",
    ]


def test_the_speed_before_a_cap_is_watched_for_as_long_as_slow_steps_need() -> None:
    """Eight steps of 10 s, and some: the outline says so too."""
    slow = replace(LLM, step_s=10.0)
    told = outline("cap", trainers=(slow,), words=f"{WORDS} cap_share=0.7")
    assert told[0] == "baseline: watch load and training speed; nothing is changed (90 s)"
