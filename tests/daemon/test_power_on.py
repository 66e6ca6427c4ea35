"""What brought the host back is asked for once, by the first daemon of the boot, and becomes a line of its story."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.cli.outages.facts import pairs
from powerguard.cli.words import sentence
from powerguard.daemon.attempt import rest
from powerguard.daemon.boots import AGAIN_AFTER_S, WhyOn, firmware_s, report_power_on
from powerguard.daemon.loop import Loop
from powerguard.effectors.bmc.engine import BmcError, Probe
from powerguard.effectors.bmc.ipmi import ChassisStatus, PowerRestorePolicy, RestartCause
from powerguard.effectors.child import Ended
from tests.daemon.looped import World, in_virtual_time
from tests.daemon.test_stops import BOOT, NEXT, power_off, world_of


def systemctl(stdout: bytes = b"FirmwareTimestampMonotonic=41250000\n", code: int = 0, *, timed_out: bool = False):  # type: ignore[no-untyped-def] # noqa: ANN201 - a Spawn
    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert (argv[:2], limit_s <= 5.0) == (["systemctl", "show"], True)
        return Ended(returncode=code, stdout=stdout, stderr=b"", timed_out=timed_out)

    return spawn


class Bmc:
    """Answers, after so many failures, what powered the host on; remembers how often it was asked."""

    def __init__(self, cause: RestartCause | None = RestartCause.POLICY_ALWAYS_ON, *, fails: int = 0) -> None:
        self.cause = cause
        self.fails = fails
        self.asked = 0

    async def why_on(self, limit_s: float) -> Probe:
        assert limit_s <= 10.0
        self.asked += 1
        if self.asked <= self.fails:
            msg = "192.0.2.9: no answer"
            raise BmcError(msg)
        status = ChassisStatus(power_on=True, policy=PowerRestorePolicy.ALWAYS_ON, ac_failed=True)
        return Probe(status=status, supported=None, restart_cause=self.cause)


@contextlib.asynccontextmanager
async def returned(world: World, why_on: WhyOn | None) -> AsyncIterator[Loop]:
    async with world.running() as daemon:
        task = asyncio.get_running_loop().create_task(report_power_on(daemon, lambda: why_on, systemctl()))
        await rest(2.0)
        assert not task.done(), "it must not end: whatever ends is started anew"
        yield daemon
        task.cancel()


def power_on_lines(world: World) -> list[dict[str, object]]:
    found = [line for line in world.lines() if line.event == "host_powered_on"]
    return [{"because": line.because, **pairs(line.payload["numbers"])} for line in found]


@in_virtual_time
async def test_it_is_asked_once_and_stands_in_the_story(tmp_path: Path) -> None:
    """A daemon that is restarted in the same boot does not ask again, and a first start without an outage never."""
    world = world_of(tmp_path)
    bmc = Bmc()
    async with returned(world, bmc.why_on):
        assert (bmc.asked, power_on_lines(world)) == (0, [])
    await power_off(world)
    world.next_boot(NEXT)
    async with returned(world, bmc.why_on):
        pass
    (line,) = power_on_lines(world)
    assert line == {
        "because": "reported by the BMC",
        "cause": "policy-always-on",
        "ac_failed": True,
        "firmware_s": 41.25,
    }
    async with returned(world, bmc.why_on):
        assert bmc.asked == 1
    assert len(power_on_lines(world)) == 1
    assert BOOT != NEXT


@in_virtual_time
async def test_a_bmc_that_starts_with_the_host_is_asked_a_second_time_and_no_third(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    await power_off(world)
    world.next_boot(NEXT)
    bmc = Bmc(fails=9)
    async with returned(world, bmc.why_on):
        await rest(10 * AGAIN_AFTER_S)
    (line,) = power_on_lines(world)
    assert (bmc.asked, line["cause"], line["because"]) == (2, "", "the BMC does not report it: 192.0.2.9: no answer")


@in_virtual_time
async def test_without_a_bmc_the_firmware_still_counts(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    await power_off(world)
    world.next_boot(NEXT)
    async with returned(world, None):
        pass
    (line,) = power_on_lines(world)
    assert (line["because"], line["firmware_s"], line["ac_failed"]) == ("the settings name no BMC", 41.25, None)


@pytest.mark.parametrize(
    ("stdout", "seconds"),
    [
        (b"FirmwareTimestampMonotonic=41250000\n", 41.25),
        (b"FirmwareTimestampMonotonic=0\n", None),
        (b"FirmwareTimestampMonotonic=\n", None),
        (b"FirmwareTimestampMonotonic=99999999999999\n", None),
        (b"FirmwareTimestampMonotonic=-4\n", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
async def test_what_the_firmware_took(stdout: bytes, seconds: float | None) -> None:
    assert await firmware_s(systemctl(stdout)) == seconds


async def test_a_systemd_that_does_not_answer_proves_nothing() -> None:
    assert await firmware_s(systemctl(code=1)) is None
    assert await firmware_s(systemctl(timed_out=True)) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"cause": "policy-always-on", "ac_failed": True, "firmware_s": 41.25},
            "powered on by policy always on (reported by the BMC; AC had been gone; firmware took 41 s)",
        ),
        (
            {"cause": "power-button", "ac_failed": False, "firmware_s": None},
            "powered on by power button (reported by the BMC; its bit for a loss of AC is clear)",
        ),
        (
            {"cause": "", "ac_failed": None, "firmware_s": None},
            "the cause of the power-on is unknown (reported by the BMC)",
        ),
    ],
)
def test_its_words(numbers: dict[str, str | float | bool | None], words: str) -> None:
    assert sentence("host_powered_on", "reported by the BMC", numbers) == words
