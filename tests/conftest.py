"""What holds for every test: nothing can be powered off, real peers are found or named, no loop is left behind."""

import asyncio
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.golden import Golden
from tests.peers import MISSING, remove_folders, require
from tests.peers.hurried import HurriedLoop

LONGEST_ID = 400

# Set before the first import of ours and inherited by every child: whatever can power off refuses while it is set.
os.environ["POWERGUARD_UNDER_TEST"] = "1"

# Whoever runs the tests in the background has Ctrl-C ignored, and so would every child of theirs that is to end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy draws slowly; that says nothing of what is tested. A commit is judged by the same examples each
# time; scripts/hunt looks for others (--hypothesis-profile=hunt). PyTorch's environment has no hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    hypothesis = importlib.import_module("hypothesis")
    slow = [hypothesis.HealthCheck.too_slow]
    for name, same in (("same", True), ("hunt", False)):
        hypothesis.settings.register_profile(name, suppress_health_check=slow, deadline=None, derandomize=same)
    hypothesis.settings.load_profile("same")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Drop the main thread's event loop.

    pytest-asyncio 1.4 and 1.5 otherwise leave one unclosed when a plain test runs before an asynchronous one, and
    its ResourceWarning, being an error here, fails a run whose tests all passed.
    """
    asyncio.set_event_loop(None)


def pytest_sessionfinish() -> None:
    """Leave nothing in /tmp of what tests shared."""
    remove_folders()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector of garbage, and let it pass over what 10,000 tests are made of from then on.

    Each worker collects all tests. That takes 13 s of a processor so, and 17 s otherwise.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long value by its length: each worker would send and compare megabytes of names."""
    return f"{argname}-{len(val)}" if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put those first that are marked so, then groups, which one worker runs; give long tests a longer limit.

    Those that start real daemons, too: each start takes a second of a processor, which may be many of a busy machine.
    """
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("first", "xdist_group")])
    for item in items:
        if getattr(config.option, "loadgroup", False) and item.get_closest_marker("xdist_group"):
            assert "@" in item.nodeid, "this pytest-xdist ignores xdist_group with this pytest"
        if item.get_closest_marker("timeout") is not None:
            continue
        if item.get_closest_marker("slow") or item.get_closest_marker("vm"):
            item.add_marker(pytest.mark.timeout(900))
        elif getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.timeout(500))  # hypothesis makes a failure smaller for up to 300 s
        elif "e2e" in item.path.parts:
            item.add_marker(pytest.mark.timeout(230))  # below faulthandler_timeout, which ends more than the test


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Honour the markers `peer` and `root`."""
    for marker in item.iter_markers("peer"):
        for program in marker.args:
            require(program)
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        pytest.skip("needs to be root")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Honour the markers `hurried`, of most tests of a module, and `real_time`, of the others."""
    hurried = item.get_closest_marker("hurried") and not item.get_closest_marker("real_time")
    return {"loop": HurriedLoop if hurried else asyncio.new_event_loop}


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A failed test has 60 s to tidy up: an event loop joins its threads, and one of them may hang for ever.

    pytest stops its own watch (faulthandler_timeout) at the first failure; this sets it again.
    """
    faulthandler.dump_traceback_later(60, exit=True, file=node.config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Python joins all threads at its end; it has 100 s for that. mutmut goes on after a session, for hours."""
    if "mutmut" not in sys.modules:
        faulthandler.dump_traceback_later(100, exit=True, file=sys.__stderr__)


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
    parser.addoption("--rewrite-golden", action="store_true", help="write the texts of tests/*/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Golden]:
    """The golden files beside the test, in a time zone that is the same everywhere."""
    rewrites = bool(request.config.getoption("--rewrite-golden"))
    assert not (rewrites and "PYTEST_XDIST_WORKER" in os.environ), "--rewrite-golden without -n: one process writes"
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC")
        time.tzset()
        yield Golden(request.path.parent / "golden", request.node.name, rewrites=rewrites)
    time.tzset()
