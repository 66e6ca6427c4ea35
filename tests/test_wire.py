"""The shared JSON shapes survive hostile input: a parser answers with a value or a clear WireError; it never raises."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.model.actions import Conduct
from powerguard.fields import clean_text
from powerguard.wire import (
    CHECKPOINTS_PATH,
    HEALTH_PATH,
    HOLD_UPLOADS_PATH,
    LEAVE_PATH,
    MAX_BODY_BYTES,
    MAX_BYTES,
    MAX_SECONDS,
    MAX_STEP,
    METRICS_PATH,
    PAUSE_PATH,
    RESUME_PATH,
    STATUS_PATH,
    TRIGGER_PATH,
    After,
    CheckpointStatus,
    Estimate,
    LastCommitted,
    LastSave,
    LeaseRequest,
    Loop,
    Phase,
    Reason,
    TrainerStatus,
    TriggerRequest,
    WireError,
    error_json,
    escalated,
    wire_id,
)

Parser = type[TriggerRequest] | type[LeaseRequest] | type[CheckpointStatus] | type[TrainerStatus]
PARSERS: tuple[Parser, ...] = (TriggerRequest, LeaseRequest, CheckpointStatus, TrainerStatus)
KEYS = sorted(
    {field.name for parser in PARSERS for field in fields(parser)} | {"age_s", "tier", "write_bw_p10", "seconds"}
)
ROUTES = (
    TRIGGER_PATH,
    CHECKPOINTS_PATH,
    STATUS_PATH,
    PAUSE_PATH,
    RESUME_PATH,
    HOLD_UPLOADS_PATH,
    LEAVE_PATH,
    HEALTH_PATH,
    METRICS_PATH,
)
WORDS = [*Reason, *After, *Phase, *Loop, "", "sha256:" + "0" * 64]

ids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:@+-]{0,40}\Z")
seconds = st.none() | st.floats(0, MAX_SECONDS)
steps = st.none() | st.integers(0, MAX_STEP)
sizes = st.none() | st.integers(0, MAX_BYTES)
texts = st.text(st.characters(categories=("L", "N", "P")), max_size=100)
digests = st.just("") | st.from_regex(r"\Asha256:[0-9a-f]{64}\Z")

requests = st.builds(
    TriggerRequest,
    id=ids,
    reason=st.sampled_from(Reason),
    deadline_s=seconds,
    after=st.sampled_from(After),
    event=texts,
    lease_s=seconds,
)
checkpoints = st.builds(
    CheckpointStatus,
    id=ids,
    phase=st.sampled_from(Phase),
    after=st.sampled_from(After),
    step=steps,
    paused=st.booleans(),
    paused_step=steps,
    deadline_s=seconds,
    eta_s=seconds,
    bytes_done=sizes,
    bytes_total=sizes,
    path=texts,
    manifest_digest=digests,
    error=texts,
)
statuses = st.builds(
    TrainerStatus,
    job=texts.filter(bool),
    step=steps,
    ranks=st.integers(1, 1000),
    hosts=st.integers(1, 1000),
    step_time_p50_s=seconds,
    step_time_p95_s=seconds,
    last_step_age_s=seconds,
    loop=st.sampled_from(Loop),
    paused=st.booleans(),
    conduct=st.sampled_from(After),
    checkpoint=st.just("") | ids,
    last_committed=st.none()
    | st.builds(
        LastCommitted,
        step=st.integers(0, MAX_STEP),
        age_s=st.floats(0, MAX_SECONDS),
        tier=st.sampled_from(["local", "remote"]),
        manifest_digest=digests,
        path=texts,
    ),
    estimate=st.none() | st.builds(Estimate, bytes=sizes, write_bw_p10=st.none() | st.floats(0, 1e15), seconds=seconds),
    snapshot_step=steps,
    lease_s=seconds,
    uploads_held=st.booleans(),
    uploads_step=steps,
    uploads_error=texts,
    uploads_failing_s=seconds,
    paused_for=st.sampled_from(["", *Reason]),
    hosts_holding=st.none() | st.integers(0, 1000),
    trouble=texts,
)
leases = st.builds(LeaseRequest, lease_s=seconds)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text()
    | st.sampled_from(WORDS)
)
nested = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
hostile = st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=5),
    nested | st.dictionaries(st.sampled_from(KEYS), nested, max_size=6),
    max_size=12,
)


@given(message=requests | leases | checkpoints | statuses)
def test_what_is_sent_is_what_is_read(
    message: TriggerRequest | LeaseRequest | CheckpointStatus | TrainerStatus,
) -> None:
    assert type(message).parse(message.to_json()) == message


@given(body=st.binary(max_size=300))
@pytest.mark.parametrize("parser", PARSERS)
def test_any_bytes_get_an_answer(parser: Parser, body: bytes) -> None:
    answer = parser.parse(body)
    if parser is LeaseRequest and answer == LeaseRequest():  # an empty body asks for no lease
        return
    assert isinstance(answer, WireError)
    assert answer.reason.isprintable()


@given(value=hostile)
def test_any_json_gets_an_answer_within_its_bounds(value: dict[str, object]) -> None:
    """Whatever gets through, whoever reads it, has every number in range and every text short and printable."""
    for parser in PARSERS:
        answer = parser.parse(json.dumps(value).encode())
        if isinstance(answer, WireError):
            assert answer.reason.isprintable()
            assert len(answer.reason) < 400
        else:
            _within_bounds(answer)


def _within_bounds(value: object) -> None:
    for field in fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if isinstance(inner, str):
            assert inner.isprintable()
            assert len(inner) <= 4096
        elif isinstance(inner, int | float):
            assert math.isfinite(inner)
            assert 0 <= inner <= MAX_STEP
        elif inner is not None:
            _within_bounds(inner)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object but a list of 1"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"id": "a", "deadline_s": NaN}', "deadline_s: must be a number of 0 to"),
        (b'{"id": "a", "deadline_s": 1e999}', "deadline_s: must be a number of 0 to"),
        (b'{"id": "a", "deadline_s": -1}', "deadline_s: must be a number of 0 to"),
        (b'{"id": "a", "deadline_s": true}', "deadline_s: must be a number"),
        (b'{"id": "a", "after": "explode"}', "after: must be one of continue, pause, exit, got 'explode'"),
        (b'{"id": "../../etc/passwd"}', "id: must be 1 to 128 of"),
        (b'{"id": "a\\n"}', "id: must be 1 to 128 of"),
        (b'{"after": "pause"}', "id: must be 1 to 128 of"),
        (b'"' + b"x" * MAX_BODY_BYTES + b'"', "a message of 65538 bytes (at most 65536)"),
        (b'\xff{"id": "a"}', "not JSON"),
    ],
)
def test_a_bad_request_is_reported_in_words(body: bytes, said: str) -> None:
    answer = TriggerRequest.parse(body)
    assert isinstance(answer, WireError)
    assert said in answer.reason


def test_a_newer_peer_is_understood() -> None:
    """Unknown keys and an unknown reason are no ground to refuse a checkpoint."""
    answer = TriggerRequest.parse(b'{"id": "a", "reason": "meteor", "colour": {"deep": [1]}, "deadline_s": 5}')
    assert answer == TriggerRequest(id="a", reason=Reason.OTHER, deadline_s=5.0)


def test_durable_is_said_of_committed_checkpoints_only() -> None:
    answer = CheckpointStatus.parse(b'{"id": "a", "phase": "writing", "durable": true}')
    assert isinstance(answer, WireError)
    assert "only a committed checkpoint is durable" in answer.reason


@pytest.mark.parametrize("eta", ["1e18", "Infinity", "1" + "0" * 300])
def test_an_endless_guess_is_the_longest_and_no_nonsense(eta: str) -> None:
    """Bytes left over a rate of nothing: the checkpoint was given up for it, although it was being written."""
    status = CheckpointStatus.parse(f'{{"id": "a", "phase": "writing", "eta_s": {eta}}}'.encode())
    assert isinstance(status, CheckpointStatus)
    assert status.eta_s == MAX_SECONDS
    for wrong in ("NaN", "-1", "true", '"5"'):
        said = CheckpointStatus.parse(f'{{"id": "a", "phase": "writing", "eta_s": {wrong}}}'.encode())
        assert isinstance(said, WireError)


def test_texts_cannot_break_a_log_line() -> None:
    """Newlines, escapes and lone surrogates from outside become question marks, and a text has an end."""
    answer = CheckpointStatus.parse(
        b'{"id": "a", "phase": "failed", "error": "x\\n\\u001b[31m\\ud800' + b"y" * 2000 + b'"}'
    )
    assert isinstance(answer, CheckpointStatus)
    assert answer.error.startswith("x??[31m?yyy")
    assert len(answer.error) == 512
    assert answer.error.encode()
    assert json.loads(error_json("a\nb")) == {"error": "a?b"}
    assert clean_text("a" * 10, 3) == "aaa"


@pytest.mark.parametrize("durable_step", [7, 8, None])
def test_at_paused_step_means_nothing_would_be_lost(durable_step: int | None) -> None:
    status = CheckpointStatus(id="a", phase=Phase.COMMITTED, durable=True, step=durable_step, paused_step=7)
    assert status.at_paused_step is (durable_step == 7)
    assert not CheckpointStatus(id="a", phase=Phase.WRITING, step=7, paused_step=7).at_paused_step


def test_after_only_escalates() -> None:
    order = [After.CONTINUE, After.PAUSE, After.EXIT]
    for low, one in enumerate(order):
        for high, other in enumerate(order):
            assert escalated(one, other) is order[max(low, high)]


def test_the_core_and_the_wire_use_the_same_words() -> None:
    """`wire` is a leaf and cannot import the core; its words must be the core's all the same."""
    assert [word.value for word in After] != []
    assert {word.value for word in After} == {word.value for word in Conduct}


@given(text=st.text())
def test_any_action_id_can_stand_in_a_url(text: str) -> None:
    name = wire_id(text)
    assert wire_id(name) == name
    assert isinstance(TriggerRequest.parse(TriggerRequest(id=name).to_json()), TriggerRequest)


def test_the_reference_page_is_true() -> None:
    """Its examples are messages that we would take, with all fields that we know and nothing else."""
    page = (Path(__file__).parents[1] / "docs/reference/trainer-endpoint.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    for parser, example in zip(PARSERS, examples, strict=True):
        message = parser.parse(example.encode())
        assert not isinstance(message, WireError), message
        assert set(json.loads(example)) - {"schema"} <= {field.name for field in fields(parser)}
        assert json.loads(example).items() <= {**json.loads(message.to_json()), **_nested(example)}.items()
        named = set(re.findall(r"`(\w+)`", page)) | set(json.loads(example))
        assert {field.name for field in fields(parser)} <= named
    status = json.loads(examples[-1])
    for key, parts in (("last_committed", LastCommitted), ("estimate", Estimate), ("last_save", LastSave)):
        assert set(status[key]) == {field.name for field in fields(parts)}
    for route in ROUTES:
        assert route in page


def _nested(example: str) -> dict[str, object]:
    return {key: value for key, value in json.loads(example).items() if isinstance(value, dict)}
