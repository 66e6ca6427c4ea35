"""Whatever breaks in an outage, the outage ends right: the host is powered off in time, and somebody is told why."""

import asyncio
import contextlib
import math
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from powerguard.sim.demo.story import numbers
from tests.e2e.peers import Mischief, Trainer
from tests.e2e.rig import BUSY_S, ENDLESS, LONG, PAUSED, ROOMY, TRAINING, Rig, rig
from tests.effectors.trainer_peers import serve_raw
from tests.peers.snmp_agent import Fault

BMC_LIMIT_S = 5.0


async def cut(world: Rig) -> None:
    world.ups.utility = False


async def ends_right(world: Rig) -> None:
    """The host is powered off while the battery still holds."""
    off = await world.off()
    assert world.ups.alive
    assert off.deadline_s >= 0.0
    world.no_traceback()


# --- The journal -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    """A disk of its own for the journal, of 256 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path) -> None:
    """Make the disk read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)


async def memory_is_told(world: Rig) -> None:
    """In memory: in the status, in the metrics, in the log."""
    await world.status_shows(
        lambda status: "journal_in_memory" in [reason["name"] for reason in status["reasons"]], "a journal in memory"
    )
    await world.metric_becomes("powerguard_journal_writable", 0.0)
    assert any(str(world.journal) in str(line) and line["level"] == "error" for line in world.log() if "level" in line)


@pytest.mark.root
async def test_the_journals_disk_fills_up() -> None:
    """No space left for a single row: told, and then an outage as ever."""
    async with rig() as world:
        with tiny_disk(world.journal.parent):
            await world.start()
            with contextlib.suppress(OSError), (world.journal.parent / "filler").open("wb", buffering=0) as filler:
                while filler.write(b"\0" * 4096):
                    pass
            await cut(world)
            await ends_right(world)
            await memory_is_told(world)
            await world.kill()


@pytest.mark.root
@pytest.mark.slow
async def test_the_journals_disk_has_turned_read_only() -> None:
    """As after a disk error and a restart: the old journal can be read but not written. Told, and no outage is lost."""
    async with rig() as world:
        with tiny_disk(world.journal.parent):
            await world.start()
            await world.kill()
            remount(world.journal.parent)
            await world.start()
            await memory_is_told(world)
            await cut(world)
            await ends_right(world)
            await world.kill()


async def test_the_journal_is_no_journal() -> None:
    """A file of rubbish is set aside and kept for whoever wants to look; the next journal is a good one."""
    async with rig() as world:
        world.journal.write_bytes(b"not a database " * 4096)
        await world.start()
        await world.until(lambda: world.logged("journal_set_aside", level="error"), "journal_set_aside")
        assert [path for path in world.journal.parent.iterdir() if path.read_bytes().startswith(b"not a database ")]
        await cut(world)
        await ends_right(world)
        assert world.offs()[0].ordered
        world.one_outage()


async def test_the_journal_is_lost_in_a_hold_and_utility_is_back() -> None:
    """Nothing but the trainer knows that powerguard has paused it: it is resumed, and no person has to notice."""
    async with rig(runtime=((PAUSED, 160.0), (TRAINING, 80.0))) as world:
        world.settings["trainers"][0]["checkpoint_s"] = 40.0  # so that the pause comes long before the commit
        await world.start()
        await cut(world)
        await world.phase("holding")
        await world.kill()
        for left in world.journal.parent.glob("journal.sqlite*"):
            left.unlink()
        world.ups.utility = True
        await world.start()
        assert world.trainers[0].paused
        await world.note("pause_forgotten", trainer="llm")
        await world.until(lambda: not world.trainers[0].paused, "training to go on")
        assert world.offs() == []
        world.no_traceback()


@pytest.mark.slow
async def test_the_journals_folder_is_gone() -> None:
    """Nowhere to write from the very start: the daemon starts all the same, says so, and protects."""
    async with rig() as world:
        (world.folder / "in the way").write_text("a file")
        world.settings["journal"]["path"] = str(world.folder / "in the way" / "journal.sqlite")
        world.journal = world.folder / "in the way" / "journal.sqlite"
        await world.start()
        await memory_is_told(world)
        await cut(world)
        await ends_right(world)
        assert not world.offs()[0].ordered


# --- Trainers --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def babbler() -> AsyncIterator[str]:
    """A server that speaks no HTTP."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(os.urandom(3000))
        await writer.drain()

    async with serve_raw(talk) as url:
        yield url


async def test_trainers_that_refuse_hang_babble_and_die() -> None:
    """Four bad trainers beside a good one: its checkpoint is durable as if it were alone, and each failure is told."""
    good = Trainer("good")
    bad = [Trainer("refuses", mischief=Mischief.REFUSES), Trainer("hangs", mischief=Mischief.HANGS)]
    dying = Trainer("dies", mischief=Mischief.DIES)
    async with rig(good, *bad, dying, runtime=LONG) as world, babbler() as url:
        world.settings["trainers"].append({"name": "babbles", "url": url, "checkpoint_s": 1.0})
        for number, trainer in enumerate(world.settings["trainers"]):
            trainer |= {"disk": f"disk-{number}", "checkpoint_s": 1.0}
        await world.start()
        await cut(world)
        await ends_right(world)
        assert [numbers(line)["trainer"] for line in world.notes("checkpoint_durable")] == ["good"]
        failed = world.notes("action_failed", action="TriggerCheckpoint")
        hung = [line.at_s for line in failed if bad[1].url in line.because]
        assert world.notes("checkpoint_durable")[0].at_s < min(hung, default=math.inf), "who hangs is not waited for"
        reasons = "\n".join(line.because for line in failed)
        assert f"{bad[0].url}: refuses" in reasons
        assert dying.url in reasons
        assert url in world.logged("trainer_unreachable", trainer="babbles")[0]["because"]
        assert len(bad[1].orders) == 1
        assert world.notes("trainer_gone", trainer="dies")
        assert len(good.orders) == 1
        assert world.was_journalled_first(good)


# --- The BMC ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_bmc_that_swallows_everything() -> None:
    """A black hole where the BMC should be: an alarm beforehand, five seconds at most at the commit."""
    async with rig(runtime=ROOMY) as world, _black_hole() as port:
        # What a BMC may take at the commit is part of the stop, so the stop of this host is longer than that.
        world.settings["budget"]["stop_q95_s"] = 6.0
        world.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": "127.0.0.1",
            "port": port,
            "user": "powerguard",
            "password": world.secret("bmc-password", "of-the-tests"),
        }
        await world.start()
        await cut(world)
        await ends_right(world)
        latched = await world.phase("shutdown")
        assert world.actions("PowerOff")[0].at_s - latched.at_s < BMC_LIMIT_S + BUSY_S
        alarm = (await world.until(lambda: world.logged("policy_unverified"), "the alarm"))[0]
        assert f"port {port}" in alarm["because"]


@contextlib.asynccontextmanager
async def _black_hole() -> AsyncIterator[int]:
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
    )
    try:
        yield int(transport.get_extra_info("sockname")[1])
    finally:
        transport.close()


# --- The card --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault.DROP, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (Fault.GARBAGE, Fault.LATE))]
)
async def test_the_card_is_lost_in_the_outage(fault: Fault) -> None:
    """Rubbish, answers that come too late, or none: dead reckoning from the last reading commits, in time."""
    async with rig() as world:
        await world.start()
        await cut(world)
        await world.phase("on_battery")
        assert world.agent is not None
        world.agent.fault = fault
        await ends_right(world)
        assert numbers(world.notes("source_lost")[0])["conduct"].startswith("dead reckoning")
        await world.until(lambda: world.logged("source_lost", level="error"), "source_lost")
        world.one_outage()


async def test_the_card_comes_back_and_utility_with_it() -> None:
    """Lost on battery, found again on utility: training never heard of it, and nothing was powered off."""
    async with rig(runtime=ENDLESS) as world:
        await world.start()
        await cut(world)
        await world.phase("on_battery")
        assert world.agent is not None
        world.agent.fault = Fault.DROP
        await world.note("source_lost")
        world.ups.utility = True
        world.agent.fault = Fault.NONE
        ended = await world.note("outage_ended")
        assert numbers(ended)["outcome"] == "ridden_through"
        assert world.notes("source_recovered")
        assert world.trainers[0].orders == []
        assert world.offs() == []
        world.one_outage()
        world.no_traceback()


# --- Sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_port_is_taken_and_the_admin_socket_cannot_be() -> None:
    """Nobody can look in: the daemon says so, protects all the same, and listens as soon as it can."""
    async with rig() as world:
        world.settings["control"]["socket"] = str(world.folder / "no such folder" / "admin.sock")
        squatter = await asyncio.start_server(lambda *_: None, "127.0.0.1", world.http_port)
        async with squatter:
            await world.start(wait=False)
            result = await world.until(lambda: world.logged("socket_unavailable"), "the sockets to be missed")
            await world.until(lambda: len(world.logged("socket_unavailable")) == 3, "all three to be missed")
            because = " ".join(line["because"] for line in world.logged("socket_unavailable"))
            assert {line["level"] for line in result} == {"error"}
            assert f"port {world.http_port}: " in because
            assert f"{world.settings['control']['socket']}: No such file or directory" in because
        await world.until(world.status, "the port to be served once it is free")
        (world.folder / "no such folder").mkdir()
        await world.until(lambda: world.logged("admin_listening"), "the admin socket to be made once it can be")
        await cut(world)
        await ends_right(world)
        assert len(world.logged("socket_unavailable")) == 3
