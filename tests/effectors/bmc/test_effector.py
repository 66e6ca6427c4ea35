"""The effector against a simulated BMC, dead ones, and a bad worker: bounded, explicit, and silent on secrets."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.core.model.actions import EnsurePolicy, PollNow
from powerguard.effectors.bmc.effector import BACK_OFF_S, BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import Failure
from powerguard.effectors.child import Ended, run_child
from powerguard.effectors.options import BmcOptions
from powerguard.options import Secret
from tests.peers.ipmi import ENSURE, failing, free_udp_port, keep_secret, options, until_heard
from tests.peers.machine import quickly, watched
from tests.peers.sim_bmc import Faults, SimBmc

USER, PASSWORD = "powerguard", "Owl-Trap-Nine-42"


@pytest.fixture
def blackhole() -> Iterator[int]:
    """A UDP port that takes everything and answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        yield hole.getsockname()[1]


def workers() -> list[int]:
    """Process ids of our own IPMI workers that still live."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            mine = int(parent) == os.getpid() and state != "Z"
            if mine and b"powerguard.effectors.bmc.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def shown_to_everybody(pid: int) -> list[bytes]:
    """Arguments and environment of a process, as /proc shows them."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]


def core_bytes(pid: int) -> str:
    """Largest core file of a process: one would hold the password."""
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[5] for line in limits if line.startswith("Max core file size"))


async def until(true: Callable[[], object], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - a process table tells nobody when it changes
            await asyncio.sleep(0.01)


def effector(tmp_path: Path, port: int, *, limit_s: float = 15.0, password: str = PASSWORD) -> BmcEffector:
    return BmcEffector(options(tmp_path, port, USER, password), limit_s=limit_s)


async def failure_of(bmc: BmcEffector, action: EnsurePolicy = ENSURE) -> BmcError:
    with pytest.raises(BmcError) as caught:
        await bmc.carry_out(action)
    return caught.value


async def test_the_policy_is_set_once_and_verified(tmp_path: Path) -> None:
    """Last state becomes always-on, read back; the second time nothing is written."""
    for heard in until_heard(["status", "set always-on", "status", "status"]):
        async with SimBmc(USER, PASSWORD, policy="last-state") as bmc:
            mine = effector(tmp_path, bmc.port)
            first = dict(await mine.carry_out(ENSURE))
            assert isinstance(first.pop("latency_s"), float)
            assert first == {
                "policy": "always-on",
                "verified": True,
                "before": "last-state",
                "changed": True,
                "power_on": True,
                "ac_failed": False,
                "engine": "ipmi-lan",
            }
            second = dict(await mine.carry_out(ENSURE))
            assert (second["before"], second["changed"], second["verified"]) == ("always-on", False, True)
            heard.extend(bmc.heard)
            assert bmc.policy == "always-on"


async def test_observe_never_writes(tmp_path: Path) -> None:
    """The wrong policy is an alarm, the right one is verified, and no set command is sent, not even to ask."""
    async with SimBmc(USER, PASSWORD, policy="always-off") as bmc:
        observer = BmcEffector(options(tmp_path, bmc.port, USER, PASSWORD, observe=True), limit_s=15.0)
        result = await failure_of(observer)
        assert "is always-off, so this host stays off" in str(result)
        assert (await observer.probe(15.0)).supported is None
        assert set(bmc.heard) == {"status", "cause"}
        await effector(tmp_path, bmc.port).carry_out(ENSURE)
        sets = bmc.heard.count("set always-on")
        seen = dict(await observer.carry_out(ENSURE))
        assert (seen["verified"], seen["changed"]) == (True, False)
        assert bmc.heard.count("set always-on") == sets > 0


async def test_no_bmc_is_said_not_hidden() -> None:
    """Kind none is an alarm: bmc.kind is none that the host comes back."""
    mine = BmcEffector(BmcOptions(kind="none"))
    assert "bmc.kind is none" in str(await failure_of(mine))
    with pytest.raises(BmcError, match=r"bmc.kind is none"):
        await mine.status(1.0)


async def test_only_its_own_action_is_carried_out() -> None:
    """A wiring mistake of ours is a bug, not an expected failure."""
    with pytest.raises(TypeError, match="not PollNow"):
        await BmcEffector(BmcOptions(kind="none")).carry_out(PollNow(id="p-1", by_s=1.0, ups="rack-a"))


@pytest.mark.parametrize(
    ("faults", "failure", "expected"),
    [
        (Faults(refuse=0xC1), Failure.UNSUPPORTED, "0xC1 (invalid command; IPMI 2.0 table 5-2); this board"),
        (Faults(refuse=0xCC), Failure.UNSUPPORTED, "0xCC"),
        (Faults(refuse=0xD4), Failure.PRIVILEGE, "needs privilege level Operator"),
        (Faults(user_level=True), Failure.PRIVILEGE, "Unauthorized role or privilege level requested in RAKP2"),
        (Faults(refuse=0xFF), Failure.PROTOCOL, "0xFF"),
        (Faults(refuse=0xC0), Failure.BUSY, "asked again at the next check"),
        (Faults(lie=True), Failure.MISMATCH, "acknowledged always-on but still reads last-state"),
        (Faults(dead=True), Failure.UNREACHABLE, "no answer"),
    ],
)
async def test_a_fault_is_reported_with_where_and_what_would_be_right(
    tmp_path: Path, faults: Faults, failure: Failure, expected: str
) -> None:
    """Each failure names the BMC, what was seen and what to do; the BMC keeps what it had."""
    async with SimBmc(USER, PASSWORD, faults=faults) as bmc:
        if faults.dead or failure is Failure.BUSY:  # it waits to the end of its time
            error = await failing(lambda limit_s: effector(tmp_path, bmc.port, limit_s=limit_s), failure)
        else:
            error = await failure_of(effector(tmp_path, bmc.port))
        assert error.failure is failure
        assert str(error).startswith(f"BMC 127.0.0.1 port {bmc.port}: ")
        assert expected in str(error)
        assert "\n" not in str(error)
        assert bmc.policy == "last-state"


async def test_a_busy_bmc_is_asked_again_within_the_limit(tmp_path: Path) -> None:
    """Busy three times, then verified."""
    async with SimBmc(USER, PASSWORD, faults=Faults(busy=3)) as bmc:
        assert dict(await effector(tmp_path, bmc.port).carry_out(ENSURE))["verified"] is True
        assert bmc.heard.count("busy") == 3


async def test_a_refused_login_is_tried_once_and_then_left_alone(tmp_path: Path) -> None:
    """BMCs lock accounts: ten minutes of rest, then twenty, up to four hours; a corrected password is tried at once."""
    now_s, hourly = 1000.0, replace(ENSURE, outage="")
    async with SimBmc(USER, PASSWORD) as bmc:
        wrong = options(tmp_path, bmc.port, USER, "not-the-password")
        mine = BmcEffector(wrong, limit_s=15.0, clock=lambda: now_s)
        first = await failure_of(mine)
        assert first.failure is Failure.AUTH
        assert "the next try is in 10 minutes" in str(first)
        now_s += BACK_OFF_S - 1
        again = await failure_of(mine)
        assert again.failure is Failure.AUTH
        assert "login was refused 599 s ago" in str(again)
        assert "in 1 s" in str(again)
        now_s += 1
        for minutes in (20, 40, 80, 160, 240, 240):
            assert f"the next try is in {minutes} minutes" in str(await failure_of(mine, hourly))
            now_s += 60 * minutes
        assert "the next try is in 240 minutes" in str(await failure_of(mine, hourly))
        now_s += BACK_OFF_S
        assert "login was refused 600 s ago" in str(await failure_of(mine, hourly))
        assert "the next try is in 20 minutes" in str(await failure_of(mine)), "an outage does not wait for hours"
        keep_secret(tmp_path / "bmc-password", PASSWORD)
        assert dict(await mine.carry_out(ENSURE))["verified"] is True
        unknown = BmcEffector(options(tmp_path, bmc.port, "somebody", PASSWORD), limit_s=15.0)
        assert (await failure_of(unknown)).failure is Failure.AUTH


class Worker:
    """Stands in for the workers: each gives `answer` once `free` is set. asked: how many were started."""

    def __init__(self, **answer: object) -> None:
        self.answer = answer
        self.asked = 0
        self.free = asyncio.Event()

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del argv, limit_s, stdin, env
        self.asked += 1
        await self.free.wait()
        return Ended(returncode=0, stdout=json.dumps(self.answer).encode(), stderr=b"")


async def test_a_wrong_password_is_not_sent_by_several_questions_at_once(tmp_path: Path) -> None:
    """At the daemon's start the policy, the draw and the cause of the restart are asked for; three refusals lock it."""
    worker = Worker(ok=False, failure="auth-failed", text="Incorrect password provided")
    mine = BmcEffector(options(tmp_path, 623, USER, PASSWORD), spawn=worker)
    worker.free.set()
    *result, watts = await asyncio.gather(
        mine.status(60.0), mine.probe(60.0), mine.power_watts(60.0), return_exceptions=True
    )
    assert worker.asked == 1
    # Which of the three was first is for the threads that read the password; of the draw no refusal is shown.
    first, later = "the next try is in 10 minutes", "login was refused"
    assert all(first in str(each) or later in str(each) for each in result), result
    assert watts is None


async def test_with_an_accepted_password_no_question_waits_for_another(tmp_path: Path) -> None:
    """A reading that hangs must not take the time of the order before the power-off."""
    worker = Worker(ok=True, status="41")
    mine = BmcEffector(options(tmp_path, 623, USER, PASSWORD), spawn=worker)
    worker.free.set()
    await mine.status(60.0)
    worker.free.clear()
    both = [asyncio.create_task(mine.status(60.0)) for _ in range(2)]
    await until(lambda: worker.asked == 3)
    worker.free.set()
    assert [status.power_on for status in await asyncio.gather(*both)] == [True, True]


async def test_a_closed_port_is_reported_at_once(tmp_path: Path) -> None:
    """The host's refusal (ICMP) is believed; pyghmi alone takes 5 s to notice."""
    for _ in quickly(4.0):
        error = await failure_of(effector(tmp_path, free_udp_port()))
        assert error.failure is Failure.UNREACHABLE
        assert "that UDP port is closed" in str(error)


async def test_a_blackhole_ends_within_the_limit_and_the_loop_stays_awake(tmp_path: Path, blackhole: int) -> None:
    """While a dead BMC is waited for everything else goes on, and the worker is gone afterwards."""
    for limit_s in (4.0, 20.0):  # the second, where the worker took most of the first to start
        async with watched() as machine:
            began_s = time.perf_counter()
            error = await failure_of(effector(tmp_path, blackhole, limit_s=limit_s))
            took_s = time.perf_counter() - began_s
        assert took_s < limit_s + 1.0 + machine.late_s
        assert machine.worst_s < 1.0, "a loop that is held up is so for all of limit_s"
        await until(lambda: not workers())
        if error.failure is Failure.UNREACHABLE:
            break
    assert error.failure is Failure.UNREACHABLE
    assert "no answer to the login" in str(error)


async def test_a_name_that_does_not_resolve_is_unreachable(tmp_path: Path) -> None:
    """RFC 2606: .invalid never resolves."""
    given = options(tmp_path, 623, USER, PASSWORD).model_copy(update={"host": "bmc.invalid"})
    error = await failing(lambda limit_s: BmcEffector(given, limit_s=limit_s), Failure.UNREACHABLE)
    assert error.failure is Failure.UNREACHABLE


async def test_a_caller_that_gives_up_kills_the_worker(tmp_path: Path, blackhole: int) -> None:
    """The action's deadline is earlier than our own limit: nothing is left behind."""
    mine = effector(tmp_path, blackhole, limit_s=300.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await mine.carry_out(ENSURE)
    await until(lambda: not workers())


async def test_a_stopped_worker_is_killed(tmp_path: Path, blackhole: int) -> None:
    """A worker that cannot end itself (here: SIGSTOP) is ended from outside."""
    for limit_s in (3.0, 20.0):  # the second, where it has ended before it was stopped
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(failure_of(effector(tmp_path, blackhole, limit_s=limit_s)))
            await until(lambda asked=asked: workers() or asked.done())  # type: ignore[misc]
            for pid in workers():
                os.kill(pid, signal.SIGSTOP)
        if asked.result().failure is Failure.TIMEOUT:
            break
    assert asked.result().failure is Failure.TIMEOUT
    assert f"killed at its limit of {limit_s:.1f} s" in str(asked.result())
    await until(lambda: not workers())


@pytest.mark.slow  # at each commit ipmi_sim falls silent (test_bmc_peers)
async def test_a_bmc_that_falls_silent_in_mid_session(tmp_path: Path) -> None:
    """pyghmi alone holds on for 28 s; here it is told in time, with the command that it was waiting for."""
    async with SimBmc(USER, PASSWORD, faults=Faults(delay_s=5.0)) as bmc:  # until it is stopped
        mine = effector(tmp_path, bmc.port, limit_s=6.0)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(failure_of(mine))
            await bmc.wait_until(lambda: "status" in bmc.heard, limit_s=60.0)
            os.kill(bmc.pid, signal.SIGSTOP)
        assert asked.result().failure is Failure.TIMEOUT
        assert "fell silent during Get Chassis Status" in str(asked.result())
        os.kill(bmc.pid, signal.SIGCONT)
        await bmc.set_faults(Faults())
        # What was asked again while it was stopped stands in its queue; it is deaf for 5 s for each of these.
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(BmcError):
                    assert dict(await effector(tmp_path, bmc.port).carry_out(ENSURE))["verified"] is True
                    break


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_failure_spoils_nothing_that_follows(tmp_path: Path, times: int) -> None:
    """In one process pyghmi never reaches a BMC again that it once failed to log in to; ours does, every time."""
    async with SimBmc(USER, PASSWORD, faults=Faults(dead=True)) as bmc:
        mine = effector(tmp_path, bmc.port)
        error = await failing(lambda limit_s: effector(tmp_path, bmc.port, limit_s=limit_s), Failure.UNREACHABLE)
        assert error.failure is Failure.UNREACHABLE
        await bmc.set_faults(Faults())
        for _ in range(times):
            assert (await mine.status(15.0)).power_on


async def test_the_password_is_nowhere_to_be_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in arguments, environment, output or logs while it runs, nor in errors, tracebacks and reprs after."""
    secrets = [PASSWORD, base64.b64encode(PASSWORD.encode()).decode(), PASSWORD.encode().hex()]
    seen: list[bytes] = []

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        seen.append(repr((argv, env)).encode())
        ended = await run_child(argv, limit_s=limit_s, stdin=stdin, env=env)
        seen.extend([ended.stdout, ended.stderr])
        return ended

    async with SimBmc(USER, PASSWORD, faults=Faults(delay_s=3.0, refuse=0xC1)) as bmc:
        given = options(tmp_path, bmc.port, USER, PASSWORD)
        mine = BmcEffector(given, spawn=spawn, limit_s=30.0)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(failure_of(mine))
            await bmc.wait_until(lambda: "status" in bmc.heard, limit_s=60.0)
            os.kill(bmc.pid, signal.SIGSTOP)  # who waits for it stays where he is
            looked_at = [*workers(), bmc.pid]
            assert len(looked_at) == 2
            for pid in looked_at:
                seen.extend(shown_to_everybody(pid))
            assert core_bytes(workers()[0]) == "0"
            os.kill(bmc.pid, signal.SIGCONT)
            await bmc.set_faults(Faults(refuse=0xC1))
    error = asked.result()
    seen.extend(text.encode() for text in (repr(error), "".join(traceback.format_exception(error))))
    seen.extend(text.encode() for text in (repr(given), repr(mine), caplog.text))
    assert b"powerguard.effectors.bmc.worker" in b"".join(seen)
    for secret in secrets:
        assert all(secret.encode() not in place for place in seen)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(returncode=1, stdout=b"", stderr=b"ModuleNotFoundError: pyghmi"), "ended with status 1 and no answer"),
        (Ended(returncode=0, stdout=b"[1]", stderr=b""), "no answer"),
        (Ended(returncode=0, stdout=b"\xff\xfe", stderr=b""), "no answer"),
        (Ended(returncode=0, stdout=b'{"ok": false, "failure": "new-kind", "text": "?"}', stderr=b""), "no answer"),
        (Ended(returncode=0, stdout=b'{"ok": true}', stderr=b""), "without data"),
        (Ended(returncode=0, stdout=b'{"ok": true, "before": "41", "after": "zz"}', stderr=b""), "without data"),
        (Ended(returncode=0, stdout=b'{"ok": true, "before": "01", "after": "01"}', stderr=b""), "reads always-off"),
    ],
)
async def test_nothing_that_a_worker_says_is_taken_for_verified_unless_it_is(
    tmp_path: Path, ended: Ended, expected: str
) -> None:
    """Only bytes of a chassis status that say always-on count; the rest is an error of one line."""

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        return ended

    error = await failure_of(BmcEffector(options(tmp_path, 623, USER, PASSWORD), spawn=spawn))
    assert expected in str(error)
    assert error.failure in (Failure.PROTOCOL, Failure.MISMATCH)


async def test_a_server_of_another_protocol_is_reported(tmp_path: Path) -> None:
    """Something else listens on that port: it is told as no answer."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.setblocking(False)
        port = other.getsockname()[1]

        async def answer() -> None:
            while True:
                _, asker = await loop.sock_recvfrom(other, 2048)
                await loop.sock_sendto(other, b"SIP/2.0 400 Bad Request", asker)

        answering = loop.create_task(answer())
        error = await failure_of(effector(tmp_path, port))
        answering.cancel()
    assert error.failure is Failure.UNREACHABLE
    assert "no answer to the login" in str(error)


async def test_a_worker_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    """No process, no memory: an error of one line, not a traceback."""

    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        raise OSError(12, "Cannot allocate memory")

    error = await failure_of(BmcEffector(options(tmp_path, 623, USER, PASSWORD), spawn=spawn))
    assert "cannot be started (Cannot allocate memory)" in str(error)


@pytest.mark.parametrize(
    ("mode", "password", "expected"),
    [
        (0o644, "x", "other users can read"),
        (0o600, "", "is empty"),
        (0o600, "x" * 21, "21 bytes"),
        (None, "x", "No such file"),
    ],
)
async def test_an_unusable_password_is_reported_before_anything_is_sent(
    tmp_path: Path, mode: int | None, password: str, expected: str
) -> None:
    """Missing, empty, readable by others, longer than the protocol has room for."""
    given = options(tmp_path, 623, USER, password)
    path = tmp_path / "bmc-password"
    if mode is None:
        path.unlink()
    else:
        path.chmod(mode)
    assert expected in str(await failure_of(BmcEffector(given)))


async def test_a_password_on_a_disk_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """A read that does not come back ends at the limit; the loop never waits for it."""
    released = threading.Event()

    class OnHungDisk(Secret):
        def read(self) -> bytes:
            released.wait(20.0)
            return b"late"

    given = options(tmp_path, 623, USER, PASSWORD)
    hung = given.model_copy(update={"password": OnHungDisk(file="/mnt/hung/bmc")})
    try:
        assert "not read within 0.5 s" in str(await failure_of(BmcEffector(hung, limit_s=0.5)))
    finally:
        released.set()


async def test_the_ipmi_library_stays_out_of_the_daemon() -> None:
    """Settings and effector import no pyghmi: 24 MB and threads belong into the worker alone (measured)."""
    modules = "powerguard.effectors.bmc.effector, powerguard.effectors.options"
    code = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('pyghmi')])"
    ended = await run_child([sys.executable, "-c", code], limit_s=60.0)
    assert (ended.returncode, ended.stdout.strip()) == (0, b"[]")


async def test_the_worker_answers_nonsense_with_a_protocol_error() -> None:
    """Its stdin may hold anything; its answer is always one object, and it quotes nothing of a request."""
    from powerguard.effectors.bmc.effector import WORKER

    for nonsense in (b"", b"[]", b'{"operation": "status", "password": "c2VjcmV0"}', b"\xff"):
        ended = await run_child(WORKER, limit_s=60.0, stdin=nonsense)
        shown = json.loads(ended.stdout)
        assert (ended.returncode, shown["ok"], shown["failure"]) == (0, False, "protocol-error")
        assert b"c2VjcmV0" not in ended.stdout + ended.stderr
