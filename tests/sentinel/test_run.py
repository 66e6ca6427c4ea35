"""The whole sentinel: a host's word, stored, and a host that comes back; and everything that must keep it off."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import BmcError, ChassisStatus, Refusal
from powerguard.effectors.bmc.ipmi import Failure
from powerguard.sentinel.decide import FRESH_S, STILL_ON_S, Intent
from powerguard.sentinel.run import LOOK_IDLE_S, LOOK_SOON_S, LOOKS_AT_ONCE, Sentinel, SentinelPorts, moment_of
from powerguard.sentinel.store import Clocks, IntentFile, IntentStore, IntentTable
from powerguard.sim.virtual import VirtualLoop
from tests.peers.ipmi import IpmiSim, options
from tests.peers.machine import folder_in_memory
from tests.peers.redfish import OwnRedfish, make_certificate, redfish_options
from tests.sentinel.rig import Chassis, Rig, Supply, arm, carried_out, check, disarm, running, settings_of


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where intents are written down: on a busy disk a look at a BMC is too old by then, by the rig's fast clock."""
    with folder_in_memory() as folder:
        yield folder


async def test_a_host_is_powered_on_again(tmp_path: Path) -> None:
    """It says so, goes off, and is powered on once; up again it takes its word back, and is told who did it."""
    async with running(tmp_path, pace=60.0) as rig:
        host = rig.chassis["n1"]
        assert await carried_out(rig.effector(), arm(in_s=40.0)) == {"in_s": 40.0, "sentinels": rig.url}
        host.power_on = False
        await rig.until(lambda: host.power_on is True)
        ordered = {"orders": 1, "ordered_by": rig.url, "because": f"{rig.url} has powered this host on"}
        for disarmed in (True, False):
            up_again = await carried_out(rig.effector(), disarm())
            assert up_again == {"sentinels": rig.url, "disarmed": disarmed, **ordered}, (
                "the host gets it for its report"
            )
        assert (host.orders, rig.outages, rig.sentinel.ends["n1", "withdrawn"]) == (1, {}, 1)
        assert await carried_out(rig.effector(), disarm("another")) == {"sentinels": rig.url, "disarmed": False}
        host.power_on = False  # a person presses the button later
        await asyncio.sleep(0.5)
        assert host.orders == 1


@pytest.mark.peer("ipmi_sim")
async def test_over_ipmi(tmp_path: Path) -> None:
    """Twice: its boot is met by the next cut, and its BMC has kept no policy."""
    for number in range(3):  # there are more tries where the worker of a BMC takes 6 s: a minute by this clock
        async with IpmiSim(plugin=False) as bmc:
            its = options(tmp_path, bmc.port, bmc.user, bmc.password)
            settings = settings_of(tmp_path / f"{number}", bmc={"n1": its})
            async with running(tmp_path, settings, pace=10.0, real_bmc=True) as rig:
                await carried_out(rig.effector(), arm(in_s=8.0))
                bmc.switch(on=False)
                await until_on_again(rig, 60.0)
                assert set(bmc.orders) == {"power 1"}
                on_battery(rig)
                await rig.until(lambda rig=rig: not fed(rig))  # type: ignore[misc]
                bmc.switch(on=False)
                await rig.until(lambda rig=rig: rig.word.on_since_s is None, 60.0)  # type: ignore[misc]
                on_utility(rig)
                await until_on_again(rig, 60.0)
                tries = rig.word.tries
                assert tries == rig.sentinel.orders["n1", "ordered"]
                assert (await carried_out(rig.effector(), disarm()))["orders"] == tries
                assert rig.outages == {}
        if tries == 2:
            break
    assert tries == 2


class Kept(IntentFile):
    """Remembers each moment of an order that was ever on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.orders: set[float] = set()

    def save(self, table: IntentTable, now: Clocks) -> None:
        self.orders |= {table.last_order_s} - {None}  # type: ignore[arg-type]
        super().save(table, now)


async def test_over_redfish_two_hosts_one_after_the_other(tmp_path: Path) -> None:
    """Both are due at once; the second one waits for the inrush of the first one."""
    certificate = make_certificate(tmp_path)
    async with OwnRedfish(certificate) as one, OwnRedfish(certificate) as two:
        its = {
            "n1": redfish_options(tmp_path, one.port, certificate),
            "n2": redfish_options(tmp_path, two.port, certificate),
        }
        settings = settings_of(tmp_path / "state", hosts=("n1", "n2"), bmc=its, of_host={"stagger_s": 30})
        kept = Kept(tmp_path / "state")
        async with running(tmp_path, settings, pace=20.0, real_bmc=True, store=kept) as rig:
            async with asyncio.TaskGroup() as tasks:
                for host in its:
                    tasks.create_task(carried_out(rig.effector(host), arm(in_s=10.0)))
            one.system["PowerState"] = two.system["PowerState"] = "Off"
            await rig.until(lambda: bool(one.resets and two.resets))
            assert (one.resets, two.resets) == (["On"], ["On"])
        first_s, *_, last_s = sorted(kept.orders)
        assert last_s - first_s >= 30.0


def on_disk(folder: Path) -> Intent:
    """The word of n1, as a sentinel that starts now would find it."""
    table, _ = IntentFile(folder / "state").load(Clocks(boot_id="", boottime_s=0.0, wall_s=0.0))
    return table.intents["n1"]


def on_battery(rig: Rig) -> None:
    rig.supplies["a"].source = OutputSource.BATTERY


def on_utility(rig: Rig) -> None:
    rig.supplies["a"].source = OutputSource.UTILITY


def fed(rig: Rig) -> bool:
    return rig.sentinel.world().supplies["a"].utility_since_s is not None


async def until_on_again(rig: Rig, limit_s: float = 60.0) -> None:
    """Wait until its BMC has said twice that it is, and its word stands."""
    await rig.until(lambda: rig.word.on_since_s is not None, limit_s)


def silent(rig: Rig) -> None:
    rig.supplies["a"].source = None


def empty(rig: Rig) -> None:
    rig.supplies["a"].more["charge_pct"] = 3.0


def forced_shutdown(rig: Rig) -> None:
    rig.supplies["a"].more["forced_shutdown"] = True


def bmc_dead(rig: Rig) -> None:
    rig.chassis["n1"].why = "BMC 10.0.0.1 port 623: no answer to the login"


def bmc_does_not_say(rig: Rig) -> None:
    rig.chassis["n1"].power_on = None


def still_on(rig: Rig) -> None:
    rig.chassis["n1"].power_on = True


def nothing_said(rig: Rig) -> None:
    rig.sentinel.keeper.apply(lambda table: table.drop("n1"))


def nothing(rig: Rig) -> None:
    assert rig.outages


@pytest.mark.parametrize(
    "keep_off",
    [on_battery, silent, empty, forced_shutdown, bmc_dead, bmc_does_not_say, still_on, nothing_said, nothing],
)
async def test_what_keeps_a_host_off(tmp_path: Path, keep_off: Callable[[Rig], None]) -> None:
    async with running(tmp_path, pace=200.0) as rig:
        await carried_out(rig.effector(), arm(in_s=50.0))
        rig.chassis["n1"].power_on = False
        keep_off(rig)
        if keep_off is nothing:
            await rig.until(lambda: rig.chassis["n1"].orders > 0)
            return
        await asyncio.sleep(0.6)  # 120 s of its own
        assert rig.chassis["n1"].orders == 0
        assert rig.outages == ({} if keep_off is nothing_said else {"n1": "o1"})


@pytest.mark.parametrize(
    ("source", "because"),
    [
        (OutputSource.UNKNOWN, "UPS a: does not report what its output comes from"),
        (OutputSource.OFF, "UPS a: its output is off"),
        (OutputSource.BATTERY, ""),
    ],
)
async def test_a_host_hears_beforehand_of_a_ups_that_never_says_utility(
    tmp_path: Path, source: OutputSource, because: str
) -> None:
    """An empty ups.status keeps it off for ever: it must not count on this sentinel. An outage is no such reason."""
    async with running(tmp_path, pace=20.0, supplies={"a": Supply(source)}) as rig:
        await rig.until(lambda: "n1" in rig.sentinel.seen and rig.sentinel.world().supplies["a"].why != "not read")
        if because:
            with pytest.raises(EffectorError, match=because):
                await carried_out(rig.effector(), check())
        else:
            assert await carried_out(rig.effector(), check()) == {"sentinels": rig.url}


async def test_a_ups_that_is_not_read_is_logged_with_the_reason_and_once(tmp_path: Path) -> None:
    """Else only the fact would be known, and not what to correct: an address, a password, a dead card."""
    with capture_logs() as logs:
        async with running(tmp_path, pace=20.0, supplies={"a": Supply(None)}) as rig:
            await rig.until(lambda: rig.sentinel.world().supplies["a"].why)
            await asyncio.sleep(0.1)
            rig.supplies["a"].source = OutputSource.UTILITY
            await rig.until(lambda: not rig.sentinel.world().supplies["a"].why)
            rig.supplies["a"].source = None
            await rig.until(lambda: rig.sentinel.world().supplies["a"].why)
            await asyncio.sleep(0.1)
    lost = [(entry["ups"], entry["because"]) for entry in logs if entry["event"] == "source_lost"]
    assert lost == [("a", "silence")] * 2
    assert [entry["ups"] for entry in logs if entry["event"] == "source_recovered"] == ["a"]


async def test_a_bmc_that_fails_is_logged_with_each_reason_and_its_end(tmp_path: Path) -> None:
    """A board that has just started gives no answer, and then refuses the password: that one is to be corrected."""
    chassis = Chassis(why="no answer")
    with capture_logs() as logs:
        async with running(tmp_path, pace=2000.0, chassis={"n1": chassis}) as rig:

            def logged(event: str) -> list[str]:
                return [entry["because"] for entry in logs if entry["event"] == event]

            await rig.until(lambda: logged("bmc_silent") == ["no answer"])
            chassis.why = "refuses the password"
            await rig.until(lambda: logged("bmc_silent") == ["no answer", "refuses the password"], 20.0)
            chassis.why = ""
            await rig.until(lambda: len(logged("bmc_back")) == 1, 20.0)


@pytest.mark.parametrize("ends", ["withdrawn", "replaced"])
async def test_why_a_host_waits_is_logged_in_each_outage(tmp_path: Path, ends: str) -> None:
    """It may be the same reason as in the outage before."""
    with capture_logs() as lines:
        async with running(tmp_path) as rig:
            rig.supplies["a"].source = OutputSource.BATTERY

            def logged() -> int:
                return sum(line["event"] == "power_on_waits" and "on battery" in line["because"] for line in lines)

            await carried_out(rig.effector(), arm("o1"))
            await rig.until(lambda: logged() == 1)
            if ends == "withdrawn":
                await carried_out(rig.effector(), disarm("o1"))
            await carried_out(rig.effector(), arm("o2"))
            await rig.until(lambda: logged() == 2, 20.0)


async def test_once_the_reason_is_gone_it_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, pace=50.0) as rig:
        on_battery(rig)
        await carried_out(rig.effector(), arm())
        rig.chassis["n1"].power_on = False
        await rig.until(lambda: "on battery" in rig.sentinel.waits.get("n1", ""))
        rig.supplies["a"].source = OutputSource.UTILITY
        await rig.until(lambda: rig.chassis["n1"].power_on is True)


async def test_what_the_host_takes_back_has_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await carried_out(rig.effector(), arm(in_s=30.0))
        assert await carried_out(rig.effector(), disarm("another")) == {"sentinels": rig.url, "disarmed": False}
        assert rig.outages == {"n1": "o1"}, "another outage's word is not taken back"
        for disarmed in (True, False):
            assert await carried_out(rig.effector(), disarm()) == {"sentinels": rig.url, "disarmed": disarmed}
            assert rig.outages == {}
        assert (rig.chassis["n1"].orders, rig.sentinel.ends["n1", "withdrawn"]) == (0, 1)


async def test_a_host_that_comes_up_by_itself_ends_it(tmp_path: Path) -> None:
    async with running(tmp_path, pace=200.0) as rig:
        silent(rig)
        await carried_out(rig.effector(), arm())
        host = rig.chassis["n1"]
        host.power_on = False
        await rig.until(lambda: rig.sentinel.keeper.table.intents["n1"].was_off)
        host.power_on = True
        await rig.until(lambda: rig.outages == {})
        assert (host.orders, rig.sentinel.ends["n1", "came_back"]) == (0, 1)


async def powered_on(rig: Rig) -> Chassis:
    """Its word, its power-off, the order, and that it is on: what comes next meets its boot."""
    host = rig.chassis["n1"]
    await carried_out(rig.effector(), arm())
    host.power_on = False
    await until_on_again(rig)
    assert host.orders == 1
    return host


@pytest.mark.parametrize("sentinel", ["looks on", "is killed in the dark", "is away meanwhile"])
async def test_the_next_cut_meets_its_boot(tmp_path: Path, sentinel: str) -> None:
    """Its BMC keeps no policy and nobody there could say a word again: the one that it has given still holds."""
    settings = settings_of(tmp_path / "state", silent_s=600.0)
    chassis, supplies = {"n1": Chassis()}, {"a": Supply()}
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> Rig:
            return await stack.enter_async_context(
                running(tmp_path, settings, chassis=chassis, supplies=supplies, pace=60.0)
            )

        rig = await start()
        host = await powered_on(rig)
        await rig.until(lambda: on_disk(tmp_path).on_at_s is not None)
        if sentinel == "is away meanwhile":
            await stack.aclose()
            host.power_on = False
            rig = await start()
        else:
            on_battery(rig)
            await rig.until(lambda: not fed(rig))
            host.power_on = False
            await rig.until(lambda: rig.word.on_since_s is None)
            if sentinel == "is killed in the dark":
                await stack.aclose()
                rig = await start()
            assert host.orders == 1, "on battery nobody is powered on"
            on_utility(rig)
        await rig.until(lambda: host.orders == 2)
        await until_on_again(rig)
        assert (rig.word.tries, rig.outages) == (2, {"n1": "o1"})
        assert (await carried_out(rig.effector(), disarm()))["orders"] == 2


@pytest.mark.parametrize("is_new", [False, True])
async def test_who_switches_it_off_in_its_boot_is_not_fought(tmp_path: Path, *, is_new: bool) -> None:
    """Its power has been there all the time since it was seen on, by a sentinel that was there, too."""
    settings = settings_of(tmp_path / "state", silent_s=600.0)
    chassis, supplies = {"n1": Chassis()}, {"a": Supply()}
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            running(tmp_path, settings, chassis=chassis, supplies=supplies, pace=60.0)
        )
        host = await powered_on(rig)
        if is_new:
            await rig.until(lambda: on_disk(tmp_path).on_at_s is not None)
            await stack.aclose()
            rig = await stack.enter_async_context(
                running(tmp_path, settings, chassis=chassis, supplies=supplies, pace=60.0)
            )
            await rig.until(lambda: fed(rig) and rig.sentinel.seen.get("n1") is not None)
            since_s = rig.sentinel.world().supplies["a"].utility_since_s
            await rig.until(lambda: (rig.word.on_at_s or 0.0) > (since_s or 0.0))
        host.power_on = False
        await rig.until(lambda: rig.outages == {})
        assert (host.orders, rig.sentinel.ends["n1", "switched_off"]) == (1, 1)


async def test_a_word_that_nobody_takes_back_ends_by_itself(tmp_path: Path) -> None:
    """Powered on, and powerguard never starts there: ten minutes later a hand at its button is nobody's business."""
    async with running(tmp_path, settings_of(tmp_path / "state", silent_s=1000.0), pace=100.0) as rig:
        host = await powered_on(rig)
        since_s = rig.word.on_since_s
        await rig.until(lambda: rig.outages == {})
        assert rig.sentinel.ends["n1", "powered_on"] == 1
        assert rig.sentinel.clock() - (since_s or 0.0) >= STILL_ON_S
        host.power_on = False
        await asyncio.sleep(0.5)
        assert host.orders == 1


async def test_what_its_bmc_said_before_does_not_count(tmp_path: Path) -> None:
    """Off for repairs, on again, and minutes later its commit: it is not "back" only because it was off once."""
    async with running(tmp_path, pace=600.0) as rig:
        host = rig.chassis["n1"]
        host.power_on = False
        await rig.until(lambda: rig.sentinel.seen["n1"].twice(power_on=False) if rig.sentinel.seen else False)
        host.power_on = True  # nobody has looked since
        silent(rig)
        await carried_out(rig.effector(), arm(in_s=80_000.0))
        await rig.until(lambda: rig.sentinel.seen["n1"].twice(power_on=True) if rig.sentinel.seen else False)
        await asyncio.sleep(0.1)
        assert (rig.outages, rig.sentinel.keeper.table.intents["n1"].was_off) == ({"n1": "o1"}, False)


async def test_dead_bmcs_hold_nobody_up(tmp_path: Path) -> None:
    """Twenty of them hang in every look; the one host that is due is looked at all the same."""
    hosts = ("n1", *(f"dead-{number}" for number in range(20)))
    chassis = {name: Chassis(hangs_s=0.0 if name == "n1" else 5.0) for name in hosts}
    settings = settings_of(tmp_path / "state", hosts=hosts)
    async with running(tmp_path, settings, chassis=chassis, pace=50.0) as rig:
        await carried_out(rig.effector(), arm(in_s=10.0))
        chassis["n1"].power_on = False
        await rig.until(lambda: chassis["n1"].orders == 1, 15.0)


class DeadPort:
    """A BMC that hangs in each look, by a virtual clock. looked_s: when it was looked at."""

    where = "BMC of the test"

    def __init__(self) -> None:
        self.looked_s: list[float] = []

    async def status(self, by_s: float) -> ChassisStatus:
        self.looked_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(12.0)
        msg = "no answer"
        raise BmcError(msg)

    async def power_on(self, by_s: float) -> None:
        """It is dead."""


def test_each_of_many_dead_bmcs_has_its_turn(tmp_path: Path) -> None:
    """A few are looked at at a time, as behind a switch without power, and one that is back must be seen soon."""
    bmcs = {f"n{number}": DeadPort() for number in range(120)}
    settings = settings_of(tmp_path / "state", hosts=tuple(bmcs))

    async def look() -> None:
        clock = asyncio.get_running_loop().time
        ports = SentinelPorts(clock=clock, wall=clock, sources=lambda *_: [], power=lambda name, _: bmcs[name])
        async with asyncio.TaskGroup() as tasks:
            sentinel = Sentinel(settings, IntentStore(IntentFile(tmp_path), moment_of(ports), tasks), ports)
            looks = [tasks.create_task(run()) for name, run in sentinel.tasks().items() if name.startswith("looks")]
            await asyncio.sleep(7200.0)
            for task in looks:
                task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(look())
    longest_s = max(later - earlier for bmc in bmcs.values() for earlier, later in pairwise(bmc.looked_s))
    assert longest_s < LOOK_IDLE_S + 12.0 * len(bmcs) / LOOKS_AT_ONCE


async def test_a_bmc_that_takes_ten_seconds_for_a_login_is_waited_for(tmp_path: Path) -> None:
    """As old boards do. Two of its answers are still fresh when the second one comes."""
    given: list[float] = []

    class Watched(Chassis):
        async def status(self, by_s: float) -> ChassisStatus:
            given.append(by_s - boottime_s())
            return await super().status(by_s)

    async with running(tmp_path, chassis={"n1": Watched(power_on=False)}) as rig:
        await rig.until(lambda: given)
    assert 10.0 < given[0] < FRESH_S - LOOK_SOON_S


async def test_after_three_tries_it_gives_up(tmp_path: Path) -> None:
    """Each is later than the one before, and the last one is followed by an alarm, not by a fourth."""
    for number in range(5):  # a try is spent, and no order, where the disk takes 50 ms: 20 s by this clock
        async with running(tmp_path, settings_of(tmp_path / f"{number}"), pace=400.0) as rig:
            host = rig.chassis["n1"]
            await carried_out(rig.effector(), arm(in_s=50.0))
            host.stuck, host.power_on = True, False
            await rig.until(lambda rig=rig: rig.outages == {})  # type: ignore[misc]
        if host.orders >= 3:
            break
    assert (host.orders, rig.sentinel.ends["n1", "gave_up"]) == (3, 1)
    first, second, third = host.ordered_s
    assert second - first >= 60.0 / 400.0
    assert third - second >= 300.0 / 400.0


async def test_the_try_is_on_disk_before_the_order(tmp_path: Path) -> None:
    """So that a sentinel that is killed in the middle of one counts it."""
    found: list[int] = []

    class Watched(Chassis):
        async def power_on_(self) -> None:
            found.append(on_disk(tmp_path).tries)
            await super().power_on_()

    async with running(tmp_path, chassis={"n1": Watched(power_on=False)}) as rig:
        await carried_out(rig.effector(), arm())
        await rig.until(lambda: found != [])
        assert found == [1]


async def test_what_changes_while_the_disk_is_at_work_counts(tmp_path: Path) -> None:
    """Utility goes again between the decision and the order: the try is spent, and the host stays off."""
    supplies = {"a": Supply()}
    has_seen_it = threading.Event()

    class Slow(IntentFile):
        def save(self, table: IntentTable, now: Clocks) -> None:
            if any(intent.tries for intent in table.intents.values()):
                supplies["a"].source = OutputSource.BATTERY
                has_seen_it.wait(60.0)
            super().save(table, now)

    settings = settings_of(tmp_path / "state")
    disk = Slow(tmp_path / "state")
    chassis = {"n1": Chassis(power_on=False)}
    async with running(tmp_path, settings, chassis=chassis, supplies=supplies, store=disk) as rig:
        await carried_out(rig.effector(), arm())
        await rig.until(lambda: "on battery" in rig.sentinel.world().supplies["a"].why)
        has_seen_it.set()
        await rig.until(lambda: "on battery" in rig.sentinel.waits.get("n1", ""))
        assert (chassis["n1"].orders, rig.sentinel.keeper.table.intents["n1"].tries) == (0, 1)


async def test_killed_between_store_and_power_on(tmp_path: Path) -> None:
    """What was stored stands, with its time and its tries; what was not stored does not."""
    chassis, supplies = {"n1": Chassis(power_on=False, stuck=True)}, {"a": Supply()}
    async with running(tmp_path, chassis=chassis, supplies=supplies, pace=60.0) as rig:
        await carried_out(rig.effector(), arm())
        await rig.until(lambda: chassis["n1"].orders == 1)
    async with running(tmp_path, chassis=chassis, supplies=supplies, pace=60.0) as rig:
        intent = rig.sentinel.keeper.table.intents["n1"]
        assert (intent.outage, intent.tries, chassis["n1"].orders) == ("o1", 1, 1)
        await rig.until(lambda: chassis["n1"].orders == 2)
        assert rig.sentinel.keeper.table.intents["n1"].tries == 2


async def test_a_host_that_is_off_comes_back_once_a_file_can_be_read_again(tmp_path: Path) -> None:
    """Another host is up meanwhile, and withdraws what it has asked for in the file: it is not powered on by it."""
    settings = settings_of(tmp_path / "state", hosts=("n1", "n2"))
    chassis, supplies = {name: Chassis() for name in settings.hosts}, {"a": Supply()}
    path = Path(settings.state) / "intents.json"
    async with running(tmp_path, settings, chassis=chassis, supplies=supplies) as rig:
        for name in settings.hosts:
            await carried_out(rig.effector(name), arm(in_s=60.0))
    kept = path.replace(path.with_name("kept"))
    path.mkdir()  # as unreadable as a file of another owner
    async with running(tmp_path, settings, chassis=chassis, supplies=supplies, pace=60.0) as rig:
        assert (await carried_out(rig.effector("n1"), disarm()))["disarmed"] is False
        for host in chassis.values():
            host.power_on = False  # a person switches n1 off
        unread = path.with_name("intents.json.unread")
        unread.rmdir()
        kept.replace(unread)
        await rig.until(lambda: chassis["n2"].power_on is True)
        assert (list(rig.outages), chassis["n1"].orders) == (["n2"], 0)


async def test_a_wall_clock_that_steps_changes_nothing(tmp_path: Path) -> None:
    """Nobody's wall clock is in what is said, and the sentinel's own counts from boot to boot alone."""
    wall_s = [1_800_000_000.0]
    async with running(tmp_path, pace=60.0, wall=lambda: wall_s[0]) as rig:
        await carried_out(rig.effector(), arm(in_s=60.0))
        for step_s in (-1e8, 3e8):
            wall_s[0] += step_s
            await asyncio.sleep(0.1)
            assert rig.outages == {"n1": "o1"}
            assert (await carried_out(rig.effector(), arm(in_s=60.0)))["in_s"] == 60.0
        rig.chassis["n1"].power_on = False
        await rig.until(lambda: rig.chassis["n1"].power_on is True)


async def test_dry_run_powers_nothing_on(tmp_path: Path) -> None:
    """It stores, decides and writes down; hosts are told beforehand and at their commit."""
    async with running(tmp_path, settings_of(tmp_path / "state", mode="dry-run")) as rig:
        with pytest.raises(EffectorError, match="runs in dry-run"):
            await carried_out(rig.effector(), check())
        with pytest.raises(EffectorError, match="runs in dry-run"):
            await carried_out(rig.effector(), arm(in_s=10.0))
        rig.chassis["n1"].power_on = False
        await rig.until(lambda: rig.outages == {})
        assert rig.chassis["n1"].orders == 0
        assert (rig.sentinel.orders["n1", "recorded"], rig.sentinel.ends["n1", "recorded"]) == (1, 1)


async def test_the_other_feed_counts_where_it_must(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "state", ups=("a", "b"))
    async with running(tmp_path, settings) as rig:
        rig.supplies["b"].source = OutputSource.BATTERY
        await carried_out(rig.effector(), arm())
        rig.chassis["n1"].power_on = False
        await rig.until(lambda: "1 of 2 supplies" in rig.sentinel.waits.get("n1", ""))
        assert rig.chassis["n1"].orders == 0
    settings = settings_of(tmp_path / "state", ups=("a", "b"), of_host={"minimum_supplies": 1})
    async with running(tmp_path, settings, chassis=rig.chassis, supplies=rig.supplies) as rig:
        await rig.until(lambda: rig.chassis["n1"].power_on is True)


async def test_a_bmc_that_refuses_for_long_is_asked_until_it_obeys(tmp_path: Path) -> None:
    """As boards and enclosures may after a power cut. An order that was refused had no effect."""
    async with running(tmp_path, pace=400.0) as rig:
        host = rig.chassis["n1"]
        await carried_out(rig.effector(), arm(in_s=50.0))
        host.refuses, host.power_on = 5, False
        await rig.until(lambda: host.orders == 1)
        assert rig.sentinel.orders["n1", "failed"] >= 5
        assert rig.word.tries <= 3


async def test_orders_without_an_answer_are_counted(tmp_path: Path) -> None:
    """They may have been carried out: a host that falls off each time is not powered on without end."""
    async with running(tmp_path, pace=400.0) as rig:
        host = rig.chassis["n1"]
        await carried_out(rig.effector(), arm(in_s=50.0))
        host.refuses, host.failure, host.power_on = 1000, Failure.TIMEOUT, False
        await rig.until(lambda: rig.outages == {})
        assert (host.refused <= 3, rig.sentinel.ends["n1", "gave_up"]) == (True, 1)


async def test_a_refused_login_rests_for_hours_only_while_no_host_waits(tmp_path: Path) -> None:
    """A directory of users that is off with the hosts makes a BMC refuse a right password."""
    async with running(tmp_path) as rig:
        refusal = Refusal(digest=b"", at_s=0.0, times=9)
        rig.sentinel._hands.refusals["BMC of the test"] = refusal
        await rig.until(lambda: "n1" in rig.sentinel.seen)
        assert refusal.times == 9
        await carried_out(rig.effector(), arm(in_s=50.0))
        await rig.until(lambda: refusal.times == 1)
