"""What holds for every test: nothing can be powered off, real peers are found or named, no loop is left behind."""

import asyncio
import os
from collections import Counter

import pytest

from tests.peers import MISSING, require

# Set before the first import of ours and inherited by every child: whatever can power off refuses while it is set.
os.environ["POWERGUARD_UNDER_TEST"] = "1"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Drop the main thread's event loop.

    pytest-asyncio 1.4 and 1.5 otherwise leave one unclosed when a plain test runs before an asynchronous one, and
    its ResourceWarning, being an error here, fails a run whose tests all passed.
    """
    asyncio.set_event_loop(None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Honour the markers `peer` and `root`."""
    for marker in item.iter_markers("peer"):
        for program in marker.args:
            require(program)
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        pytest.skip("needs to be root")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the peers that were not there, and how many tests each of them kept from running."""
    reasons = (str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    missing = Counter(reason.partition(MISSING)[2].split(maxsplit=1)[0] for reason in reasons if MISSING in reason)
    if missing:
        terminalreporter.section("peers that are missing", sep="!", yellow=True)
        for program, tests in sorted(missing.items()):
            terminalreporter.line(f"{program}: {tests} tests skipped")
        terminalreporter.line("scripts/test-peers gets them (as root it installs Debian packages).")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-scenarios", action="store_true", help="write the answers of tests/scenarios anew")
