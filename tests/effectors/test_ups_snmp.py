"""Layer B through a card: what is asked of it, set and read back, and every way in which a card fails to do it.

The simulated output with its card stands at our own port; the same over real SNMP is in test_ups_snmp_peers.py.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import OutputOffOptions
from powerguard.effectors.ups_output import by_snmp
from powerguard.effectors.ups_output.effector import Notes, OutputEffector
from powerguard.sim import snmp_values as sim
from powerguard.sim.ups import APC
from powerguard.ups.profiles.commands import Switch
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.schema import SetType, Verb
from powerguard.ups.profiles.vocabulary import Answer, DeviceError, Missing, Oid
from tests.peers.hurried import now_s
from tests.peers.machine import at_once, folder_in_memory
from tests.peers.ups_output import XUPS, SimCard, SimOutput, U

pytestmark = pytest.mark.hurried

PROFILES = load_profiles(None)

RFC = frozenset({XUPS})
"""A card that speaks RFC 1628 alone."""
EATON = frozenset({U})
APC_CARD = frozenset({U, XUPS})
REBOOT = f"{APC}.6.2.2.0"
SHUTDOWN_TYPE, SHUTDOWN, STARTUP, RESTART = f"{U}.8.1.0", f"{U}.8.2.0", f"{U}.8.3.0", f"{U}.8.5.0"
SHED = f"{XUPS}.9.6.0"
NO_ACCESS, NOT_WRITABLE, READ_ONLY, GEN_ERR, WRONG_VALUE = 6, 17, 4, 5, 10


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where the order is written down, which may take half a second."""
    with folder_in_memory() as folder:
        yield folder


class Direct:
    """The card without a network, at our own port. late_s: of each answer. Broken: nothing can be read.

    sets: "" they are answered; "lost": neither carried out nor answered; "mute": carried out and not answered. drops:
    how many of the next SETs are lost. hangs_at: a SET of this object is carried out, and its answer never ends.
    shows_late_s: how long an object still reads as before its SET.
    """

    where = "10.0.0.5:161"
    silent = "no answer from 10.0.0.5:161"

    def __init__(self, card: SimCard) -> None:
        self.card = card
        self.sets = ""
        self.drops = 0
        self.broken = False
        self.late_s = 0.0
        self.hangs_at = ""
        self.shows_late_s = 0.0
        self.before: dict[str, tuple[float, Answer]] = {}

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        await asyncio.sleep(self.late_s)
        if self.broken:
            raise DeviceError(self.silent, unanswered=True)
        values = self.card.values()
        found = {oid: _plain(values[oid].content) if oid in values else Missing.NO_SUCH_OBJECT for oid in oids}
        return found | {oid: old for oid, (until_s, old) in self.before.items() if oid in found and now_s() < until_s}

    async def set(self, oid: str, kind: SetType, raw: int | str) -> None:
        assert kind == ("timeticks" if ".5.2." in oid and oid.startswith(APC) else "integer")
        await asyncio.sleep(self.late_s)
        if self.drops:
            self.drops -= 1
            raise DeviceError(self.silent, unanswered=True)
        if self.shows_late_s:
            self.before[oid] = now_s() + self.shows_late_s, (await self.get([oid]))[oid]
        status = True if self.sets == "lost" else self.card.take(oid, sim.integer(int(raw)))
        if oid == self.hangs_at:
            await asyncio.Event().wait()
        if self.sets:
            raise DeviceError(self.silent, unanswered=True)
        if status is not True:
            msg = f"10.0.0.5:161: status {status} for {oid}"
            raise DeviceError(msg)

    async def find(self, verb: Verb, outlet: str) -> Switch:
        lacks = self.card.lacks
        name = "apc-powernet" if lacks >= APC_CARD else "rfc1628" if lacks >= RFC else "xups"
        return Switch(PROFILES.by_name[name], verb, outlet)


def _plain(content: int | bytes | str | None) -> Answer:
    assert content is not None
    return Oid(content) if isinstance(content, str) else content


@dataclass
class Rig:
    """A card, and the effector that is to tell it. restart: as after a restart of the daemon."""

    card: SimCard
    wire: Direct
    make: Callable[..., OutputEffector]
    effector: OutputEffector

    def restart(self, **more: object) -> None:
        self.effector = self.make(**more)

    async def check(self) -> Detail:
        return await self.effector.carry_out(
            CheckPowerOn(id="c", by_s=now_s() + 5, method=PowerOnMethod.OUTPUT, ups="rack-a")
        )

    async def arm(self, in_s: float = 120.0, *, outage: str = "o1", limit_s: float = 5.0) -> dict[str, object]:
        by_s = now_s() + limit_s
        order = ArmPowerOn(id="a", by_s=by_s, method=PowerOnMethod.OUTPUT, outage=outage, in_s=in_s, ups="rack-a")
        return dict(await self.effector.carry_out(order))

    async def disarm(self, *, outage: str = "o1") -> dict[str, object]:
        order: Action = DisarmPowerOn(
            id="d", by_s=now_s() + 5, method=PowerOnMethod.OUTPUT, outage=outage, ups="rack-a"
        )
        return dict(await self.effector.carry_out(order))

    @property
    def sets(self) -> list[str]:
        return [name for name, _ in self.card.sets]


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Rig]:
    """Make a UPS on battery whose card takes orders. more: of the settings."""

    def make_rig(*, lacks: frozenset[str] = RFC, **more: object) -> Rig:
        card = SimCard(SimOutput(), now_s, utility=lambda: False, lacks=lacks)
        wire = Direct(card)
        settings = OutputOffOptions.model_validate({"by": "snmp", **more})

        @asynccontextmanager
        async def opened() -> AsyncIterator[Direct]:
            yield wire

        def make(*, boot: str = "boot-1", armed: bool = True, least_s: float = 100.0) -> OutputEffector:
            output = by_snmp.opening(opened, settings, now_s)
            notes = Notes(tmp_path, run=at_once)
            return OutputEffector({"rack-a": output}, notes=notes, clock=now_s, boot=boot, least_s=least_s, armed=armed)

        return Rig(card, wire, make, make())

    return make_rig


Make = Callable[..., Rig]
NO_NOTES = ["", "{", '{"outage": 1}', "[" * 5000, '{"outage": 1, "boot": 2, "at_s": 3, "in_s": 4}']

# --- Looking --------------------------------------------------------------------------------------------------------


async def test_a_check_sets_nothing_and_shows_what_the_ups_promises(rig: Make) -> None:
    """Done hourly: a card's settings are written to a memory that wears."""
    there = rig()
    detail = dict(await there.check())
    assert (detail["returns"], detail["control"], detail["shown"]) == ("cycles", "rfc1628 off_with_return", True)
    assert (detail["longest_s"], detail["can_cancel"], detail["returns_by"]) == (86400, True, "profile rfc1628")
    assert there.card.sets == []


async def test_what_the_site_has_tried_counts_more_than_the_file(rig: Make) -> None:
    there = rig(returns="aborts")
    detail = dict(await there.check())
    assert (detail["returns"], detail["returns_by"]) == ("aborts", "settings")
    assert (await there.arm())["returns"] == "aborts"


def _restart_off(card: SimCard) -> None:
    card.output.restart = False


def _without_startup(card: SimCard) -> None:
    card.lacks = RFC | {STARTUP}


def _counting(card: SimCard) -> None:
    card.output.off_at_s = card.clock() + 60


def _without_controls(card: SimCard) -> None:
    card.lacks = RFC | {f"{U}.8."}


@pytest.mark.parametrize(
    ("wrong", "because"),
    [
        (_restart_off, "upsAutoRestart is 2 and must be 1: set it on the card"),
        (_without_startup, "rfc1628 off_with_return lacks upsStartupAfterDelay"),
        (_counting, r"a countdown to output off is already running: \d+ s left"),
        (_without_controls, "lacks upsAutoRestart, upsShutdownType"),
    ],
)
async def test_what_would_keep_it_from_working_is_reported_beforehand(
    rig: Make, wrong: Callable[[SimCard], None], because: str
) -> None:
    there = rig()
    wrong(there.card)
    with pytest.raises(EffectorError, match=because):
        await there.check()
    assert there.card.sets == []


@pytest.mark.parametrize(
    ("least_s", "control", "because"),
    [(90_000.0, "off_with_return", "waits at most 86400 s, and the host needs 90000 s"), (100.0, "reboot", "acts at")],
)
async def test_a_command_that_cannot_wait_long_enough_is_refused(
    rig: Make, least_s: float, control: str, because: str
) -> None:
    """RFC 1628's reboot switches off at once: it would take the host down in the middle of its stop."""
    there = rig(control=control)
    there.restart(least_s=least_s)
    with pytest.raises(EffectorError, match=because):
        await there.check()
    if control == "reboot":
        with pytest.raises(EffectorError, match=because):
            await there.arm()
    assert there.card.sets == []


async def test_in_dry_run_it_looks_and_orders_nothing(rig: Make) -> None:
    there = rig()
    there.restart(armed=False)
    assert dict(await there.check())["returns"] == "cycles"
    assert await there.arm() == {"dry_run": True}
    assert await there.disarm() == {"dry_run": True}
    assert there.card.sets == []


# --- Arming ---------------------------------------------------------------------------------------------------------


async def test_it_opens_the_way_back_first_and_cuts_last(rig: Make) -> None:
    """Each value is read back before the next; what is told is the countdown as the card shows it."""
    there = rig()
    _restart_off(there.card)
    there.card.shutdown_type = 2
    detail = await there.arm(119.2)
    assert there.card.sets == [(RESTART, 1), (SHUTDOWN_TYPE, 1), (STARTUP, 150), (SHUTDOWN, 120)]
    assert isinstance(detail["in_s"], float)
    assert 100 < detail["in_s"] <= 120
    assert (detail["returns"], detail["again"], detail["shown"]) == ("cycles", False, True)
    off_s = there.card.output.off_in_s(now_s())
    assert off_s is not None
    assert 100 < off_s <= 120


async def test_eatons_command_is_one_set(rig: Make) -> None:
    """It promises the way back by itself, and nothing calls it off."""
    there = rig(lacks=EATON)
    assert dict(await there.check())["can_cancel"] is False
    detail = await there.arm()
    assert there.card.sets == [(SHED, 120)]
    assert detail["returns"] == "cycles"
    with pytest.raises(EffectorError, match=r"cannot be cancelled: its output goes off in 1\d\d s"):
        await there.disarm()
    assert there.card.sets == [(SHED, 120)]


async def test_apcs_delays_are_rounded_up_and_its_countdown_is_not_shown(rig: Make) -> None:
    """The card takes the next value that its UPS knows; what it took is what counts."""
    there = rig(lacks=APC_CARD)
    assert dict(await there.check())["shown"] is False
    detail = await there.arm(119.0)
    assert there.card.sets == [(f"{APC}.5.2.10.0", 11_900), (f"{APC}.5.2.9.0", 3000), (REBOOT, 3)]
    assert (detail["in_s"], detail["returns"], detail["shown"]) == (pytest.approx(120, abs=1), "cycles", False)
    there.restart()
    with pytest.raises(
        EffectorError, match=r"already has the order of this boot.* it may be off in 1\d\d s; the order is not repeated"
    ):
        await there.arm(119.0)
    assert there.sets.count(REBOOT) == 1
    with pytest.raises(
        EffectorError, match=r"already has the order of this boot.* it may be off in 1\d\d s; the order is not repeated"
    ):
        await there.arm(119.0, outage="o2")
    with pytest.raises(EffectorError, match="cannot be cancelled"):
        await there.disarm()
    there.restart(boot="boot-2")
    with pytest.raises(EffectorError, match=r"cannot be cancelled: its output goes off 120 s after the order"):
        await there.disarm()  # The core asks this only of a host that may be back before the cut.
    assert (await there.disarm(outage=""))["disarmed"] is True, "another boot: it has cut, or never will"


async def test_a_longer_time_than_the_ups_can_wait_is_refused(rig: Make) -> None:
    there = rig(lacks=APC_CARD)
    with pytest.raises(EffectorError, match="upsAdvConfigShutoffDelay takes at most 600 s, and 601 s are needed"):
        await there.arm(601.0)
    assert there.card.sets == []


@pytest.mark.parametrize("how", ["lost", "mute"])
async def test_of_a_set_without_an_answer_nobody_knows_where_nothing_is_shown(rig: Make, how: str) -> None:
    there = rig(lacks=APC_CARD)
    there.wire.sets = how
    with pytest.raises(EffectorError, match=r"no answer|was set to"):
        await there.arm(limit_s=3.0)
    assert there.sets.count(REBOOT) == (how == "mute")


@pytest.mark.parametrize("lacks", [RFC, EATON])
async def test_the_same_order_after_a_restart_is_not_sent_again(rig: Make, lacks: frozenset[str]) -> None:
    """The core repeats an order whose outcome it never heard; the note says whose the countdown is."""
    there = rig(lacks=lacks)
    await there.arm()
    before = list(there.card.sets)
    there.restart()
    detail = await there.arm()
    assert detail["again"] is True
    assert isinstance(detail["in_s"], float)
    assert 90 < detail["in_s"] < 120
    assert there.card.sets == before


@pytest.mark.parametrize(
    ("outage", "boot", "note", "off_s"),
    [
        ("o2", "boot-1", True, None),  # an outage later
        ("o1", "boot-2", True, None),  # a boot later: its clock began anew
        ("o1", "boot-1", False, None),  # somebody else's, or the note is lost
        ("o1", "boot-1", True, 20.0),  # somebody has shortened it
    ],
)
async def test_a_countdown_that_is_not_ours_is_left_alone(
    tmp_path: Path, rig: Make, outage: str, boot: str, off_s: float | None, *, note: bool
) -> None:
    there = rig()
    await there.arm()
    before = list(there.card.sets)
    if not note:
        (tmp_path / "output-rack-a.json").unlink()
    if off_s is not None:
        there.card.output.off_at_s = now_s() + off_s
    there.restart(boot=boot)
    with pytest.raises(EffectorError, match="left, that this host has not ordered in this outage"):
        await there.arm(outage=outage)
    assert there.card.sets == before


@pytest.mark.parametrize("text", NO_NOTES)
async def test_a_damaged_note_is_none(tmp_path: Path, rig: Make, text: str) -> None:
    """Half written by a power cut of an earlier outage: it must not keep this one from being armed."""
    (tmp_path / "output-rack-a.json").write_text(text, encoding="utf-8")
    there = rig()
    assert (await there.arm())["again"] is False


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_what_is_no_file_is_no_note(tmp_path: Path, rig: Make, make: Callable[[Path], None]) -> None:
    """A pipe would hold the order up for ever."""
    make(tmp_path / "output-rack-a.json")
    there = rig()
    async with asyncio.timeout(60):
        assert (await there.arm())["again"] is False


async def test_a_note_that_cannot_be_written_does_not_keep_it_from_being_armed(tmp_path: Path, rig: Make) -> None:
    """The disk may be full or read-only; in memory it is known all the same."""
    (tmp_path / "output-rack-a.draft").mkdir()
    there = rig()
    assert (await there.arm())["again"] is False
    assert (await there.arm())["again"] is True


async def test_a_longer_delay_that_is_still_shown_is_not_taken_for_the_ordered_one(rig: Make) -> None:
    """Cards answer a SET before their UPS does; training would wait until the time that is shown was over."""
    there = rig(lacks=APC_CARD)
    there.card.apc_s = [600, 300]
    there.wire.shows_late_s = 0.3
    assert (await there.arm())["in_s"] == pytest.approx(120, abs=2)


async def test_a_longer_delay_that_stays_is_taken_in_time_for_a_bare_stop(rig: Make) -> None:
    """A card that rounds up to what it held already."""
    there = rig(lacks=APC_CARD, return_after_s=100)
    there.card.apc_s = [180, 300]
    assert (await there.arm(150.0, limit_s=2.0))["in_s"] == pytest.approx(180, abs=2)


# --- Cards that do not do it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [NO_ACCESS, NOT_WRITABLE, READ_ONLY, GEN_ERR, WRONG_VALUE])
@pytest.mark.parametrize("refused", [RESTART, SHUTDOWN_TYPE, STARTUP, SHUTDOWN])
async def test_a_refused_set_leaves_the_card_as_it_was(tmp_path: Path, rig: Make, refused: str, status: int) -> None:
    """Whichever it is: what was set before it is taken back, and the output stays on. Auto restart may stay on."""
    there = rig()
    there.card.shutdown_type = 2
    there.card.refuses = {refused: status}
    refusal = f"rack-a: .*status {status} for {refused}|refused: .*status {status}"
    with pytest.raises(EffectorError, match=refusal) as caught:
        await there.arm()
    assert caught.value.harmless, "so that a late reboot is not excluded by a cut that never comes"
    assert (there.card.shutdown_type, there.card.output.start_at_s, there.card.output.off_at_s) == (2, None, None)
    assert there.sets.count(SHUTDOWN) == (refused == SHUTDOWN)
    assert not (tmp_path / "output-rack-a.json").exists()


async def test_a_card_that_takes_everything_and_does_nothing(rig: Make) -> None:
    """Its auto restart reads on, so only the countdown gives it away: the one before the cut, so that none is sent."""
    there = rig()
    there.card.ignores = True
    with pytest.raises(EffectorError, match="upsStartupAfterDelay was set to 150 s, and no countdown runs"):
        await there.arm()
    assert SHUTDOWN not in there.sets


@pytest.mark.parametrize(
    ("fault", "because"),
    [("ignores", "has accepted the order, but no countdown runs"), ("stuck", "its countdown stays at 120 s")],
)
async def test_an_order_that_is_taken_and_not_obeyed(rig: Make, fault: str, because: str) -> None:
    there = rig(lacks=EATON)
    setattr(there.card, fault, True)
    with pytest.raises(EffectorError, match=because) as caught:
        await there.arm()
    assert not caught.value.harmless, "what this card has no command to cancel may still come"
    assert there.sets == [SHED]


async def test_a_card_that_cuts_the_delay_down_in_silence(rig: Make) -> None:
    """It would take the power away while the host still stops: called off."""
    there = rig()
    there.card.most_s = 60
    with pytest.raises(EffectorError, match=r"would be off in \d+ s: too soon for the host") as caught:
        await there.arm()
    assert caught.value.harmless, "so that a late reboot is not excluded by a cut that was called off"
    assert there.card.output.off_at_s is None
    assert there.card.output.start_at_s is None


async def test_a_card_on_which_one_countdown_ends_the_other(rig: Make) -> None:
    """The output would go off and, with utility back too early, stay off: called off, and not armed."""
    there = rig()
    there.card.one = True
    with pytest.raises(
        EffectorError, match="has accepted the order, but upsStartupAfterDelay was set to 150 s, and no"
    ) as caught:
        await there.arm()
    assert caught.value.harmless
    assert there.card.output.off_at_s is None


async def test_a_set_whose_answer_is_lost_is_read_back_and_not_repeated(rig: Make) -> None:
    """UDP: the card has begun to count, and we have heard nothing."""
    there = rig(lacks=EATON)
    there.wire.sets = "mute"
    assert (await there.arm())["again"] is False
    assert there.card.sets == [(SHED, 120)]


async def test_what_does_not_act_is_set_again_when_it_was_lost(rig: Make) -> None:
    """One packet in ten may be lost where a switch has just changed over; the way back must not hang on it."""
    there = rig()
    there.card.shutdown_type = 2
    there.wire.drops = 1
    await there.arm()
    assert there.card.sets == [(SHUTDOWN_TYPE, 1), (STARTUP, 150), (SHUTDOWN, 120)], "auto restart stood already"
    there = rig()
    there.card.shutdown_type = 2
    _restart_off(there.card)
    there.wire.drops = 2
    await there.arm(outage="o2")
    assert there.card.sets == [(RESTART, 1), (SHUTDOWN_TYPE, 1), (STARTUP, 150), (SHUTDOWN, 120)]


async def test_a_set_that_is_lost_is_a_failure_that_says_so(rig: Make) -> None:
    there = rig(lacks=EATON)
    there.wire.sets = "lost"
    with pytest.raises(EffectorError, match=r"no answer from .*, but no countdown runs") as caught:
        await there.arm(limit_s=3.0)
    assert not caught.value.harmless
    assert there.card.sets == []
    there.wire.sets = ""
    assert (await there.arm())["again"] is False, "nothing runs, so nothing was sent"


async def test_a_card_that_cannot_be_read_is_sent_nothing(rig: Make) -> None:
    there = rig()
    there.wire.broken = True
    for order in (there.check, there.arm):
        with pytest.raises(EffectorError, match=r"rack-a: no answer from 10\.0\.0\.5:161"):
            await order()
    assert there.card.sets == []


async def test_it_ends_before_its_deadline(rig: Make) -> None:
    """Whoever is cut off in the middle cannot say what has been done."""
    there = rig()
    there.wire.late_s = 0.3
    began_s = now_s()
    with pytest.raises(EffectorError, match=r"answers too slowly: .* \d\.\d s") as caught:
        await there.arm(limit_s=1.5)
    assert now_s() - began_s < 1.5
    assert float(str(caught.value).rpartition(" within ")[2].split()[0]) <= 1.2
    assert SHUTDOWN not in there.sets
    assert caught.value.harmless, "so that a late reboot is not excluded by a cut that never comes"


async def test_what_ends_once_the_order_is_out_may_have_armed_it(rig: Make) -> None:
    """The card takes the one SET that acts, and answers nothing any more."""
    there = rig()
    there.wire.hangs_at = SHUTDOWN
    with pytest.raises(EffectorError, match="answers too slowly") as caught:
        await there.arm()
    assert not caught.value.harmless


async def test_an_ups_that_nobody_named_is_not_switched(rig: Make) -> None:
    there = rig()
    order = CheckPowerOn(id="c", by_s=now_s() + 5, method=PowerOnMethod.OUTPUT, ups="rack-b")
    with pytest.raises(EffectorError, match=r"ups\.rack-b\.output_off is not set"):
        await there.effector.carry_out(order)


# --- Disarming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outage", ["o1", ""])
async def test_both_countdowns_are_called_off(rig: Make, outage: str) -> None:
    """Of the outage that ordered it; of any where the journal was lost, which is what the note is for."""
    there = rig()
    await there.arm()
    assert (await there.disarm(outage=outage))["disarmed"] is True
    assert (there.card.output.off_at_s, there.card.output.start_at_s) == (None, None)
    assert there.card.sets[-2:] == [(SHUTDOWN, -1), (STARTUP, -1)]
    assert (await there.disarm())["because"] == "no order was given in this outage"
    assert (await there.arm())["again"] is False


async def test_nothing_of_another_is_called_off(rig: Make) -> None:
    """Another outage's order, and a countdown that somebody put in place of ours."""
    there = rig()
    await there.arm()
    before = list(there.card.sets)
    assert (await there.disarm(outage="o2"))["because"] == "no order was given in this outage"
    there.card.output.off_at_s = now_s() + 500
    assert "another program's countdown runs" in str((await there.disarm())["because"])
    there.card.output.off_at_s = now_s() + 120
    there.restart(boot="boot-2")  # A note of another boot: whose countdown this is, nobody can say.
    assert "another program's countdown runs" in str((await there.disarm(outage=""))["because"])
    assert there.card.sets == before


async def test_a_card_that_does_not_call_it_off(rig: Make) -> None:
    there = rig()
    await there.arm()
    there.card.refuses = {SHUTDOWN: GEN_ERR}
    with pytest.raises(EffectorError, match=r"upsShutdownAfterDelay cannot be set: .*status 5"):
        await there.disarm()
    there.card.refuses = {}
    assert (await there.disarm())["disarmed"] is True, "the core tries again"
