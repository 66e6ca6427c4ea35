"""Whatever a card answers, the decoder answers too: it never raises, and never gives a number outside its window."""

from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.profiles.decode import decode
from powerguard.profiles.load import load_profiles
from powerguard.profiles.probe import choose
from powerguard.profiles.values import Answer, Missing, Oid
from powerguard.profiles.vocabulary import NUMBERS
from powerguard.profiles.walk import format_walk, parse_walk

PROFILES = load_profiles(None).ranked()
OIDS = sorted(
    {
        *(oid for profile in PROFILES for oid in profile.scalars()),
        *(
            f"{column}.{row}"
            for profile in PROFILES
            for column in profile.columns()
            for row in ("1", "2.0", "3", "0.1")
        ),
        *(f"{profile.absolute(profile.alarm_table.column)}.1" for profile in PROFILES if profile.alarm_table),
    }
)
NUMBER = st.one_of(
    st.integers(), st.integers(-2, 300), st.sampled_from([0, -1, 65535, 9999, 2**31 - 1, 2**32 - 1, 2**64, -(2**63)])
)
ANSWER = st.one_of(
    NUMBER,
    st.binary(max_size=80),
    st.text("01", max_size=70).map(str.encode),
    st.sampled_from(list(Missing)),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12).map(
        lambda numbers: Oid(".".join(map(str, [1, *numbers])))
    ),
    st.integers(1, 24).map(lambda alarm: Oid(f"1.3.6.1.2.1.33.1.6.3.{alarm}")),
)
ANSWERS = st.dictionaries(st.sampled_from(OIDS), ANSWER)


@settings(max_examples=300, deadline=None)
@given(ANSWERS)
def test_any_answer_decodes_to_something_believable(answers: dict[str, Answer]) -> None:
    decoded = decode(PROFILES, answers)
    for name, window in NUMBERS.items():
        value = getattr(decoded, name)
        assert value is None or window.lowest <= value <= window.highest * (12 if name == "watts" else 1), name
    if decoded.runtime_s is not None and decoded.output_source != "battery":
        assert decoded.runtime_s >= 30
    if decoded.runtime_s == 0:
        assert decoded.low_battery or (decoded.charge_pct is not None and decoded.charge_pct <= 20)
    assert decode(PROFILES, answers) == decoded
    choose(PROFILES, answers, sys_object_id="", sys_descr="")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(OIDS), ANSWER))
def test_a_written_walk_reads_back_as_it_was(answers: dict[str, Answer]) -> None:
    kept = {oid: answer for oid, answer in answers.items() if answer is Missing.NULL or not isinstance(answer, Missing)}
    assert parse_walk(format_walk(answers), "made") == kept
