"""A log handler of the training's own that raises, a full disk's say, ends nothing of ours."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.trainer.log import log
from powerguard.trainer.ranks import Memory, MemoryRanks
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.ranks.replica import Replica
from powerguard.trainer.tiers.upload import Uploader
from tests.trainer.tiers.rig import save, until


class Raising(logging.Handler):
    """As one that writes to a disk or a server of its own, without a word for errors."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        msg = "no space left"
        raise OSError(msg)


@pytest.fixture
def handler() -> Iterator[Raising]:
    handler = Raising()
    logger = logging.getLogger("powerguard.trainer")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_an_entry_names_where_it_was_written(handler: Raising) -> None:
    log.warning("%d of %s", 2, "three")
    (record,) = handler.records
    assert (record.getMessage(), record.name, record.pathname) == ("2 of three", "powerguard.trainer", __file__)


def test_the_uploader_tries_again(handler: Raising, tmp_path: Path) -> None:
    saved = save(tmp_path / "root", 7, mib=1)
    uploader = Uploader(str(tmp_path / "nas"), job="llm", retry_s=0.1)
    uploader.offer(saved)
    until(lambda: handler.records)
    (tmp_path / "nas").mkdir()
    until(lambda: uploader.status().commits)
    uploader.close()


def test_those_who_wait_for_lost_ranks_are_let_go(handler: Raising) -> None:
    ranks = MemoryRanks(Memory(), 0, 2)
    replica = Replica(ranks, applied=lambda *_: None, changed=lambda: None, clock=boottime_s, lost_s=1.0)
    replica.lose("no answer")
    assert "no answer" in replica.lost
    assert handler.records
