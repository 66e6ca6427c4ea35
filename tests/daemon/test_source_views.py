"""What operators see of each source: its newest failure, and what must be put right although it answers."""

from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.daemon.observe.port import SourceViews
from powerguard.ups.base import Publish
from tests.ups.apcupsd import apcupsd_helpers
from tests.ups.nut import nut_helpers


@dataclass
class Poller:
    """A source that never polls. trouble: what is wrong with it."""

    trouble: str = ""

    async def run(self, publish: Publish) -> None:
        """Not run here."""

    def poll_now(self) -> None:
        """Not asked here."""


class Plain:
    """A source that has no trouble to tell of."""

    async def run(self, publish: Publish) -> None:
        """Not run here."""

    def poll_now(self) -> None:
        """Not asked here."""


def test_a_lost_source_that_fails_for_another_reason_says_so() -> None:
    """The loss is told with its first reason: an operator who has put that right must hear of the next one, once."""
    now_s = [0.0]
    views = SourceViews(lambda: now_s[0])
    views.begin([("a", "nut", Plain())])

    def fails(reason: str, *, lost: bool = True) -> None:
        views.take(SourceFailed(at_s=now_s[0], ups="a", source="nut", reason=reason, lost=lost))

    with capture_logs() as logs:
        fails("no answer", lost=False)
        for reason in ("no answer", "refused", "no answer", "refused", *(f"odd {number}" for number in range(50))):
            fails(reason)
        (view,) = views.all()
        assert (view.up, view.failures, view.last_error) == (False, 55, "odd 49")
        logged = [entry["because"] for entry in logs]
        assert logged == ["refused", *(f"odd {number}" for number in range(6))]
        views.take(Reading(at_s=1.0, ups="a", source="nut", output_source=OutputSource.UTILITY))
        assert views.all()[0].last_error == ""
        fails("refused")
        fails("no answer")
    assert [entry["because"] for entry in logs[7:]] == ["no answer"]
    assert {entry["event"] for entry in logs} == {"failure_changed"}


def test_what_is_shown_of_sources() -> None:
    """Those of the settings and no others; trouble at the moment of asking; silence, as the watchdog sees it."""
    now_s = [0.0]
    views, poller = SourceViews(lambda: now_s[0]), Poller()
    views.begin([("a", "nut", poller), ("a", "snmp", Plain())])
    assert [(view.source, view.up, view.trouble) for view in views.all()] == [("nut", False, ""), ("snmp", False, "")]
    poller.trouble = "the login is refused"
    now_s[0] = 50.0
    views.take(Reading(at_s=50.0, ups="a", source="snmp", output_source=OutputSource.UTILITY))
    assert [(view.up, view.trouble) for view in views.all()] == [(False, "the login is refused"), (True, "")]
    assert (views.silent(60.0), views.silent(40.0)) == ("", "a/nut")
    views.begin([("a", "snmp", Plain())])
    assert [(view.source, view.polls) for view in views.all()] == [("snmp", 1)]


@pytest.mark.hurried
@pytest.mark.parametrize(("driver", "forgeable"), [("usbhid-ups", False), ("snmp-ups", True)])
async def test_no_other_host_forges_what_a_nut_of_this_host_reads_by_cable(driver: str, *, forgeable: bool) -> None:
    """Upsd at 127.0.0.1 without TLS is no alarm. That its driver reads the card over the network is one."""
    async with (
        nut_helpers.FakeUpsd({**nut_helpers.VALUES, "driver.name": driver}).serving() as peer,
        nut_helpers.listening(nut_helpers.options(peer.port)) as (source, heard),
    ):
        views = SourceViews(nut_helpers.now_s)
        views.begin([("rack-a", source.name, source)])
        views.take(await nut_helpers.until(heard, Reading))
        (view,) = views.all()
    assert (view.authenticated, view.forgeable) == (False, forgeable)


@pytest.mark.hurried
@pytest.mark.parametrize(("driver", "forgeable"), [("USB UPS Driver", False), ("SNMP UPS Driver", True)])
async def test_no_other_host_forges_what_an_apcupsd_of_this_host_reads_by_cable(
    driver: str, *, forgeable: bool
) -> None:
    async with (
        apcupsd_helpers.apcupsd(DRIVER=driver) as peer,
        apcupsd_helpers.listening(peer.port) as (source, heard),
    ):
        views = SourceViews(apcupsd_helpers.now_s)
        views.begin([("rack-a", source.name, source)])
        views.take(await apcupsd_helpers.until(heard, Reading))
        (view,) = views.all()
    assert (view.authenticated, view.forgeable) == (False, forgeable)
