"""Every status has a meaning, and a Location never leads to another host: the table itself, without a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from powerguard.core.model.actions import Conduct
from powerguard.effectors.trainer.effector import seen
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.effectors.trainer.peer import Meaning, classify
from powerguard.wire import After, Estimate, LastCommitted, TrainerStatus

pytestmark = pytest.mark.hurried

OURS = "/api/v1/checkpoints/a1"


@pytest.mark.parametrize(
    ("status", "location", "retry_after", "meaning"),
    [
        (202, OURS, None, Meaning.NATIVE),
        (200, OURS, None, Meaning.NATIVE),
        (202, None, None, Meaning.DUMB_ASYNC),
        (202, "/elsewhere", None, Meaning.DUMB_ASYNC),
        (200, None, None, Meaning.DUMB_SYNC),
        (201, "/made/1", None, Meaning.DUMB_SYNC),
        (204, None, None, Meaning.DUMB_SYNC),
        (409, None, None, Meaning.ADOPT),
        (423, OURS, None, Meaning.ADOPT),
        (404, None, None, Meaning.NO_ROUTE),
        (405, None, None, Meaning.NO_ROUTE),
        (501, None, None, Meaning.NO_ROUTE),
        (401, None, None, Meaning.BAD_TOKEN),
        (403, None, None, Meaning.BAD_TOKEN),
        (429, None, None, Meaning.BUSY),
        (429, None, "5", Meaning.BUSY),
        (503, None, "5", Meaning.BUSY),
        (503, None, None, Meaning.FAILED),
        (500, None, None, Meaning.FAILED),
        (502, None, None, Meaning.FAILED),
        (599, None, None, Meaning.FAILED),
        (302, "http://evil/", None, Meaning.REFUSED),
        (400, None, None, Meaning.REFUSED),
        (418, None, None, Meaning.REFUSED),
    ],
)
def test_the_table(status: int, location: str | None, retry_after: str | None, meaning: Meaning) -> None:
    assert classify(status, location=location, retry_after=retry_after).meaning is meaning


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/api/v1/checkpoints/a", "/api/v1/checkpoints/a"),
        ("http://evil.example/api/v1/checkpoints/a", "/api/v1/checkpoints/a"),
        ("//evil.example/x", None),
        ("/api/v1/checkpoints/a/../../../etc", None),
        ("/api/v1/checkpoints/a?wait=1", "/api/v1/checkpoints/a"),
        ("/api/v1/checkpoints/", None),
        ("/api/v1/checkpoints/a b", None),
        ("http://[", None),
        ("/api/v1/checkpoints/" + "a" * 3000, None),
    ],
)
def test_a_location_is_one_of_ours_or_none(location: str, path: str | None) -> None:
    """Only the path is ever used, on the connection that we chose."""
    assert classify(202, location=location, retry_after=None).location == path


@given(status=st.integers(100, 999), location=st.none() | st.text(), retry_after=st.none() | st.text())
def test_any_answer_has_a_meaning(status: int, location: str | None, retry_after: str | None) -> None:
    verdict = classify(status, location=location, retry_after=retry_after)
    assert 0 <= verdict.retry_after_s < 1e9
    assert (verdict.meaning is Meaning.NATIVE) <= (verdict.location is not None)


@pytest.mark.parametrize(
    ("asked", "willing", "conduct"),
    [
        ("pause", After.PAUSE, Conduct.PAUSE),
        ("pause", After.CONTINUE, Conduct.CONTINUE),
        ("pause", After.EXIT, Conduct.PAUSE),
        ("exit", After.EXIT, Conduct.EXIT),
        ("exit", After.PAUSE, Conduct.PAUSE),
        ("continue", After.EXIT, Conduct.CONTINUE),
    ],
)
def test_it_does_what_is_asked_but_no_more_than_it_is_willing_to(asked: str, willing: After, conduct: Conduct) -> None:
    options = TrainerOptions.model_validate({"name": "llm", "url": "unix:/run/x.sock", "after": asked})
    assert seen(options, TrainerStatus(job="llm", conduct=willing), 5.0).conduct is conduct


def test_no_claim_brings_a_shutdown_nearer() -> None:
    """A trainer that says it needs a day, or steps of an hour, is believed up to what the settings allow."""
    options = TrainerOptions(name="llm", url="unix:/run/x.sock", max_checkpoint_s=100.0, disk="nvme0")
    status = TrainerStatus(
        job="llm",
        step=9,
        step_time_p95_s=3600.0,
        estimate=Estimate(seconds=86400.0),
        last_committed=LastCommitted(step=8, age_s=3.0),
    )
    news = seen(options, status, 5.0)
    assert (news.checkpoint_s, news.step_s, news.disk, news.durable_step, news.durable_age_s) == (
        100,
        100,
        "nvme0",
        8,
        3,
    )
    status = TrainerStatus(job="llm", estimate=Estimate(bytes=800, write_bw_p10=100.0))
    assert seen(options, status, 5.0).checkpoint_s == 10.0
    assert seen(options, status, 5.0).stall_s is None
    quick = TrainerStatus(job="llm", estimate=Estimate(seconds=20.0, stall_s=0.5))
    assert seen(options, quick, 5.0).stall_s == 0.5
    assert (
        seen(options, TrainerStatus(job="llm", estimate=Estimate(bytes=800, write_bw_p10=0.0)), 5.0).checkpoint_s
        is None
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "unix:relative.sock"}, "absolute path"),
        ({"url": "unix:/" + "x" * 120}, "at most 107 bytes"),
        ({"url": "https://localhost:1"}, "must be unix:/path"),
        ({"url": "http://localhost"}, "must be unix:/path"),
        ({"url": "http://localhost:99999"}, "must be unix:/path"),
        ({"url": "http://me:secret@localhost:80"}, "must be unix:/path"),
        ({"url": "http://localhost:80/save"}, "must be unix:/path"),
        ({"url": "http://10.0.0.5:80"}, "needs a token"),
        ({"url": "unix:/a", "size_bytes": 5}, "go together"),
        ({"url": "unix:/a", "checkpoint_s": 700.0}, "longer than max_checkpoint_s"),
        ({"url": "unix:/a", "max_checkpoint_s": 1e-9}, "greater than or equal to 1"),
        ({"url": "http://localhost:80", "uids": [0]}, "no effect with a TCP port"),
        ({"url": "unix:/a", "after": "burn"}, "'pause', 'exit' or 'continue'"),
        ({"url": "unix:/a", "name": "a/b"}, "should match pattern"),
        ({"url": "unix:/a", "checkpoint_dir": "here"}, "should match pattern"),
    ],
)
def test_bad_settings_say_what_would_be_right(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerOptions.model_validate({"name": "llm", **settings})


def test_the_seed_of_a_checkpoints_time() -> None:
    url = "http://[::1]:5000"
    assert TrainerOptions(name="a", url=url).seed_s == 60.0
    assert TrainerOptions(name="a", url=url, max_checkpoint_s=20.0).seed_s == 20.0
    assert TrainerOptions(name="a", url=url, checkpoint_s=5.0).seed_s == 5.0
    assert TrainerOptions(name="a", url=url, size_bytes=8_500_000_000, write_bytes_per_s=0.5e9).seed_s == 34.0
