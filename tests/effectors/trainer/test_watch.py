"""Trainers are found, watched and believed within bounds: by their sockets, their users, and what they say."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from powerguard.clock import boottime_s
from powerguard.core.model.actions import Conduct, ResumeTrainer
from powerguard.core.model.events import TrainerSeen
from powerguard.effectors.base import EffectorError
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.options import Secret
from powerguard.trainer.store.store import newest_in
from tests.effectors.trainer_peers import RESUME, STATUS, TRIGGER, PublishedEvents, effector, order, serve
from tests.peers.machine import watched
from tests.trainer.toy import Toy, short_folder

TOKEN = "Curlew-Anvil-Four-58"
SAID = {"body": {"job": "llm", "step": 7, "conduct": "pause", "step_time_p95_s": 0.5}}


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, with tracebacks, as one text."""
    text = io.StringIO()
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        logger_factory=structlog.PrintLoggerFactory(text),
        cache_logger_on_first_use=False,
    )
    yield text
    structlog.configure(**before)


def llm(url: str, **more: object) -> TrainerOptions:
    return TrainerOptions.model_validate({"name": "llm", "url": url, **more})


async def until(true: Callable[[], object], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110 - a list tells nobody when it grows
            await asyncio.sleep(0.02)


async def failure_of(doing: Awaitable[object]) -> str:
    with pytest.raises(EffectorError) as caught:
        await doing
    return str(caught.value)


def last(published: PublishedEvents) -> TrainerSeen:
    return published.seen[-1]


# --- Watching ---------------------------------------------------------------------------------------------------------


async def test_what_it_says_is_published() -> None:
    async with serve({STATUS: [SAID]}) as peer, effector(llm(peer.url, disk="d0")) as (made, published):
        await made.look()
    news = last(published)
    assert (news.trainer, news.alive, news.conduct, news.step, news.step_s) == ("llm", True, Conduct.PAUSE, 7, 0.5)
    assert (news.checkpoint_s, news.disk, news.paused) == (None, "d0", False)


async def test_one_that_falls_silent_stays_what_it_was() -> None:
    """Hung, or answering nonsense, it is still there: its conduct must not change in the core's sums."""
    answers: list[dict[str, object]] = [SAID, {"status": 500}, {"body": "{"}, {"body": {"job": "llm", "step": -1}}]
    async with serve({STATUS: [*answers]}) as peer, effector(llm(peer.url)) as (made, published):
        for _ in answers:
            await made.look()
    assert [(news.alive, news.conduct, news.step) for news in published.seen] == [(True, Conduct.PAUSE, 7)] * 4


async def test_a_dumb_one_is_alive_and_continues() -> None:
    async with serve({}) as peer, effector(llm(peer.url)) as (made, published):
        await made.look()
    assert (last(published).alive, last(published).conduct, last(published).checkpoint_s) == (
        True,
        Conduct.CONTINUE,
        None,
    )


async def test_one_that_goes_and_comes_back_is_reported_each_time(log: io.StringIO, folder: Path) -> None:
    path = folder / "llm.sock"
    async with effector(llm(f"unix:{path}")) as (made, published):
        await made.look()
        await made.look()
        async with serve({STATUS: [SAID]}, path=path):
            await made.look()
        await made.look()
    assert [news.alive for news in published.seen] == [False, False, True, False]
    events = [line.split("event=")[1].split()[0] for line in log.getvalue().splitlines()]
    assert events == ["'trainer_unreachable'", "'trainer_reachable'", "'trainer_unreachable'"], "told on change only"


async def test_trouble_behind_one_that_answers_is_reported_on_change_only(log: io.StringIO) -> None:
    """Uploads that fail, and ranks that have lost each other, are somebody's to mend before the outage."""
    said: dict[str, object] = dict(SAID["body"])
    fails = {**said, "uploads_error": "access is denied", "uploads_failing_s": 340.0}
    lost = {**fails, "trouble": "lost the others"}
    fine = {**said, "uploads_step": 7, "uploads_error": ""}
    answers = [{"body": body} for body in (said, fails, fails, lost, fine, fine)]
    async with serve({STATUS: [*answers]}) as peer, effector(llm(peer.url)) as (made, published):
        for _ in answers:
            await made.look()
    assert len(published.seen) == len(answers)
    texts = [line for line in log.getvalue().splitlines() if "troubled" in line]
    assert [("denied" in line, "lost" in line, "'uploads'" in line, "untroubled" in line) for line in texts] == [
        (True, False, True, False),
        (False, True, False, False),
        (False, False, False, True),
    ]


async def test_watch_goes_round_until_it_is_cancelled() -> None:
    async with (
        serve({STATUS: [SAID]}) as peer,
        effector(llm(peer.url)) as (made, published),
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(made.watch(every_s=0.05))
        await until(lambda: len(published.seen) >= 3)
        task.cancel()


async def test_a_token_never_shows(log: io.StringIO, tmp_path: Path) -> None:
    """Refused, redirected, echoed back at us: it is in no log line, no event, no message, no traceback, no repr."""

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"job": 5, "error": request.headers["Authorization"]}, status=401)

    async def garble(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.write(f"HTTP/1.1 {request.headers['Authorization']}\x00\r\n\r\n".encode())
        request.transport.close()
        return web.Response()

    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o400)
    said: list[str] = []
    for handler in (echo, garble):
        async with serve({STATUS: [handler], TRIGGER: [handler], RESUME: [handler]}) as peer:
            options = llm(peer.url, token=Secret(file=str(secret)))
            async with effector(options) as (made, published):
                await made.look()
                resume = ResumeTrainer(id="r", by_s=boottime_s() + 30, trainer="llm", outage="o")
                for action in (order(3.0), resume):
                    with pytest.raises(EffectorError) as caught:
                        await made.carry_out(action)
                    said.append(repr(caught.value))
                said += [repr(published), repr(made), repr(options), options.model_dump_json()]
        assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in peer.headers)
        assert len(peer.headers) >= 3
    assert TOKEN not in log.getvalue() + "".join(said)
    assert "trainer_unreachable" in log.getvalue()


# --- Finding --------------------------------------------------------------------------------------------------------


async def test_sockets_are_found_by_name_and_lost_when_they_go(folder: Path) -> None:
    (folder / "notes.txt").write_text("no socket")
    (folder / "file.sock").write_text("no socket either")
    (folder / "link.sock").symlink_to(folder / "new.sock")
    async with effector(discover=folder) as (made, published):
        await made.look()
        assert published == []
        async with serve({STATUS: [SAID]}, path=folder / "new.sock"):
            await made.look()
            assert made.names == ("new",)
            assert (last(published).trainer, last(published).alive) == ("new", True)
        (folder / "new.sock").unlink(missing_ok=True)
        await made.look()
        assert made.names == ()
        assert (last(published).trainer, last(published).alive) == ("new", False)


async def test_sockets_that_go_together_are_lost_once_although_orders_look_as_well(folder: Path) -> None:
    """The trainers of a job end together, and an order for one that is not known lists the folder as the watch does."""
    paths = [folder / f"llm-{number}.sock" for number in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for path in paths:
            await stack.enter_async_context(serve({STATUS: [SAID]}, path=path))
        made, published = await stack.enter_async_context(effector(discover=folder))
        await made.look()
        assert len(made.names) == len(paths)
        for path in paths:
            path.unlink()
        unknown = [ResumeTrainer(id=f"r{n}", by_s=boottime_s() + 60, trainer="x", outage="o1") for n in range(3)]
        ended = await asyncio.gather(made.look(), *map(made.carry_out, unknown), return_exceptions=True)
    assert [type(each) for each in ended] == [type(None), *[EffectorError] * 3]
    assert sorted(seen.trainer for seen in published.seen if not seen.alive) == [path.stem for path in paths]


async def test_one_of_an_earlier_daemon_that_nobody_has_any_more_is_reported_as_gone(folder: Path) -> None:
    """Taken out of the settings before a restart, or ended since: else it counts in every sum for ever.

    One that was killed leaves its socket. One whose socket is there and that does not answer (stopped by a signal, say)
    is not gone.
    """
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "killed.sock"))
    hung = socket.socket(socket.AF_UNIX)
    with contextlib.closing(hung):
        hung.bind(str(folder / "hung.sock"))
        hung.listen(5)
        remembered = ["llm", "found", "hung", "killed"]
        async with effector(llm(f"unix:{folder}/x"), discover=folder, remembered=lambda: remembered) as (
            made,
            published,
        ):
            await made.look()
            there = {seen.trainer: seen.alive for seen in published if seen.trainer != "llm"}
            assert there == {"found": False, "killed": False}
            assert not [seen for seen in published if seen.trainer == "hung" and not seen.alive]
            remembered.remove("found")
            published.clear()
            await made.look()
            assert not [seen for seen in published if seen.trainer == "found"]


async def test_an_order_before_the_first_look_finds_its_trainer(folder: Path) -> None:
    """A daemon that was restarted in an outage repeats its orders at once: none of their tries must be lost."""
    script = {STATUS: [SAID], RESUME: [SAID]}
    async with serve(script, path=folder / "llm.sock"), effector(discover=folder) as (made, _published):
        orders = [ResumeTrainer(id=f"r{n}", by_s=boottime_s() + 60, trainer="llm", outage="o1") for n in range(2)]
        first, second = await asyncio.gather(*(made.carry_out(each) for each in orders))
        assert dict(first)["resumed"] is dict(second)["resumed"] is True
        with pytest.raises(EffectorError, match="no trainer 'other'"):
            await made.carry_out(replace(orders[0], trainer="other"))
        assert made.names == ("llm",)


async def test_a_socket_that_is_no_trainers_is_left_alone(folder: Path) -> None:
    """The daemon's own admin socket in the folder of trainers, also if it is named by another path."""
    named = folder / "elsewhere"
    named.symlink_to(folder)
    async with (
        serve({STATUS: [SAID]}, path=folder / "admin.sock"),
        serve({STATUS: [SAID]}, path=folder / "llm.sock"),
        effector(discover=folder, others=(str(named / "admin.sock"),)) as (made, _published),
    ):
        await made.look()
        assert made.names == ("llm",)


async def test_a_stranger_cannot_crowd_a_trainer_out(folder: Path) -> None:
    """Every user may put sockets there: a hundred of somebody else's, first by name, hide neither old nor new ones."""

    async with serve({STATUS: [SAID]}, path=folder / "llm.sock"), effector(discover=folder) as (made, published):
        await made.look()
        assert made.names == ("llm",)
        for number in range(100):
            path = folder / f"0{number:02}.sock"
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
            if os.geteuid() == 0:
                os.chown(path, 65534, -1)
        await made.look()
        assert (made.names, last(published).alive) == (("llm",), True), "a known one was crowded out"
        if os.geteuid() == 0:  # only root can make sockets of another user than itself
            async with serve({STATUS: [SAID]}, path=folder / "new.sock"):
                for _ in range(10):  # one that answers too late is told at the next look
                    await made.look()
                    if len(made.names) > 1:
                        break
                assert made.names == ("llm", "new"), "a new one of an allowed user was crowded out"


async def test_a_found_one_that_only_hangs_up_stays_known_as_gone(folder: Path) -> None:
    """Its socket is still there, nobody behind it: killed, and perhaps about to be restarted."""
    with Toy(folder, socket_name="toy.sock") as toy:
        async with effector(discover=folder) as (made, published):
            await made.look()
            assert last(published).alive
            toy.kill()
            toy.end()
            await made.look()
            assert (made.names, last(published).alive) == (("toy",), False)


async def test_a_configured_one_is_not_found_twice(folder: Path, log: io.StringIO) -> None:
    async with (
        serve({STATUS: [SAID]}, path=folder / "a.sock"),
        serve({STATUS: [SAID]}, path=folder / "llm.sock") as imposter,
        effector(llm(f"unix:{folder}/a.sock"), discover=folder) as (made, published),
    ):
        await made.look()
        await made.look()
    assert made.names == ("llm",)
    assert {news.trainer for news in published.seen} == {"llm"}
    assert imposter.asked == []
    assert log.getvalue().count("trainer_ignored") == 1


@contextlib.contextmanager
def stranger(folder: Path) -> Iterator[None]:
    """Let another user serve evil.sock in the folder; he writes down in `got` whatever he is sent."""
    folder.chmod(0o1777)
    ready, told_ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(folder / "evil.sock"))
            server.listen()
            os.write(told_ready, b"x")
            got = b"got:"
            for _ in range(3):
                got += server.accept()[0].recv(1000)
            (folder / "got.new").write_bytes(got)
            (folder / "got.new").rename(folder / "got")
        finally:
            os._exit(0)
    os.close(told_ready)
    try:
        assert os.read(ready, 1) == b"x"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)


@pytest.mark.root
async def test_a_strangers_socket_is_ignored_before_anything_is_sent(folder: Path, log: io.StringIO) -> None:
    """The folder is open to all users: whoever puts a socket there must be allowed to, or hears nothing from us."""
    with stranger(folder):
        async with effector(discover=folder) as (made, published):
            await made.look()
            await made.look()
            assert (made.names, list(published)) == ((), [])
        options = llm(f"unix:{folder}/evil.sock", uids=[0])
        async with effector(options) as (made, published):
            with pytest.raises(EffectorError, match=r"uid 65534, which is not allowed \(allowed: 0; see uids"):
                await made.carry_out(order())
        await until((folder / "got").exists)
        assert (folder / "got").read_bytes() == b"got:"
    assert log.getvalue().count("trainer_ignored") == 1


@pytest.mark.root
async def test_a_strangers_socket_is_an_alarm_until_it_is_gone(folder: Path, log: io.StringIO) -> None:
    """A training may be unguarded behind it: the operator allows its user, or removes the socket."""
    async with (
        effector(discover=folder) as (made, _),
        effector(llm(f"unix:{folder}/evil.sock", uids=[0])) as (named, _),
    ):
        with stranger(folder):
            for each in (made, named):
                await each.look()
                (result,) = each.strangers
                assert "served by uid 65534" in result
        (folder / "evil.sock").unlink()
        for each in (made, named):
            await each.look()
            assert each.strangers == ()
    events = [line.split("event=")[1].split()[0] for line in log.getvalue().splitlines()]
    assert events == ["'trainer_ignored'", "'trainer_stranger'", "'trainer_unreachable'"]


@pytest.mark.root
async def test_a_name_that_a_stranger_takes_from_a_known_one_ends_that_one(folder: Path) -> None:
    """The core must not count on a trainer whose socket is another user's by now."""
    async with effector(discover=folder) as (made, published):
        async with serve({STATUS: [SAID]}, path=folder / "evil.sock"):
            await made.look()
            assert last(published).alive
        (folder / "evil.sock").unlink(missing_ok=True)
        with stranger(folder):
            await made.look()
            assert (last(published).trainer, last(published).alive) == ("evil", False)
            assert len(made.strangers) == 1


@pytest.mark.root
async def test_a_trainer_whose_name_is_taken_is_asked_under_its_users_own(folder: Path) -> None:
    """With settings, and without: its user's own name counts only if that user has made it."""
    with stranger(folder):
        async with serve({STATUS: [SAID]}, path=folder / "evil.0.sock"):
            async with effector(llm(f"unix:{folder}/evil.sock", uids=[0]), discover=folder) as (made, published):
                await made.look()
                assert (made.names, last(published).alive, last(published).step) == (("llm",), True, 7)
                assert made.strangers != (), "the other one is still an alarm"
            async with effector(discover=folder) as (made, published):
                await made.look()
                assert (made.names, last(published).alive) == (("evil.0",), True)
            os.chown(folder / "evil.0.sock", 65534, -1)
            async with effector(llm(f"unix:{folder}/evil.sock", uids=[0])) as (made, published):
                await made.look()
                assert not last(published).alive


async def test_no_number_of_names_hides_a_trainer(folder: Path, log: io.StringIO) -> None:
    """Every user can make names: all are read, and the crowd is logged once."""
    async with serve({STATUS: [SAID]}, path=folder / "llm.sock"):
        for number in range(7000):
            (folder / f"a{number}.sock").touch()
        async with effector(discover=folder) as (made, published):
            await made.look()
            await made.look()
            assert (made.names, last(published).alive) == (("llm",), True)
            (crowded,) = made.strangers
            assert "crowded" in crowded
            for number in range(7000):
                (folder / f"a{number}.sock").unlink()
            await made.look()
            assert made.strangers == ()
    assert log.getvalue().count("trainers_crowded") == 1


# --- The real thing ---------------------------------------------------------------------------------------------------


async def test_an_outage_with_a_real_trainer(folder: Path) -> None:
    """Found, triggered, paused and durable at its step, resumed in place: one process, two protocol ends, one disk."""
    with Toy(folder, "--step-ms", "5", "--mb", "20", "--mb-per-s", "5") as toy:
        async with effector(discover=folder) as (made, published):
            await made.look()
            news = last(published)
            assert (news.trainer, news.alive, news.conduct, news.paused) == ("toy", True, Conduct.PAUSE, False)
            action = replace(order(60.0), trainer="toy")
            detail = dict(await made.carry_out(action))
            assert (detail["native"], detail["verified"], detail["paused"], detail["at_paused_step"]) == (True,) * 4
            saved = newest_in(toy.checkpoints)
            assert saved is not None
            assert (saved.step, saved.path, saved.size_bytes) == (detail["step"], detail["path"], detail["bytes"])
            assert saved.manifest_digest == detail["digest"]
            assert published.stages[-1] == "committed"
            assert "writing" in published.stages
            await made.look()
            assert (last(published).paused, last(published).durable_step) == (True, saved.step)
            assert last(published).checkpoint_s is not None
            again = dict(await made.carry_out(action))
            assert again["path"] == detail["path"], "the same id is the same checkpoint"
            resumed = ResumeTrainer(id="r1", by_s=boottime_s() + 30, trainer="toy", outage="o1")
            assert dict(await made.carry_out(resumed))["resumed"] is True
        toy.until_step(saved.step + 3)


async def test_a_trainer_killed_in_mid_write_is_reported_at_once(folder: Path) -> None:
    """The battery is not burnt for it, and the torn checkpoint counts for nothing."""
    with Toy(folder, "--step-ms", "5", "--mb", "60", "--mb-per-s", "10") as toy:
        async with effector(llm(f"unix:{toy.socket}")) as (made, published), asyncio.TaskGroup() as group:
            task = group.create_task(failure_of(made.carry_out(order(60.0))))
            await until(lambda: "writing" in published.stages)
            toy.kill()
            async with watched() as machine:
                began_s = time.perf_counter()
                said = await task
                assert time.perf_counter() - began_s < 3.0 + machine.late_s
        assert "the trainer ended while its checkpoint was writing" in said
        assert not last(published).alive
        assert newest_in(toy.checkpoints) is None


async def test_a_stopped_trainer_is_hung_and_then_goes_on(folder: Path) -> None:
    """SIGSTOP: it is alive, it says nothing, and when it wakes the same id is one checkpoint."""
    with Toy(folder, "--step-ms", "5") as toy:
        async with effector(llm(f"unix:{toy.socket}")) as (made, published), asyncio.TaskGroup() as group:
            await made.look()
            toy.kill(signal.SIGSTOP)
            task = group.create_task(made.carry_out(order(60.0)))
            await until(lambda: "hung" in published.stages)
            toy.kill(signal.SIGCONT)
            assert dict(await task)["at_paused_step"] is True
        assert all(news.alive for news in published.seen)
        assert len(emergencies(toy)) == 1


async def test_an_exit_is_heard_before_it_happens(folder: Path) -> None:
    """The process ends after its checkpoint, but not before we have read that it is durable."""
    with Toy(folder, "--step-ms", "5", "--conduct", "exit", "--mb", "2") as toy:
        async with effector(llm(f"unix:{toy.socket}", after="exit")) as (made, published):
            detail = dict(await made.carry_out(order(60.0, after=Conduct.EXIT)))
            assert (detail["verified"], detail["at_paused_step"]) == (True, True)
            assert await asyncio.to_thread(toy.end, timeout_s=60) == (0, "")
            await made.look()
            assert not last(published).alive


def emergencies(toy: Toy) -> list[Path]:
    """All checkpoints: this toy makes none by the clock. One that was given up may still lie there, uncommitted."""
    return [path for path in toy.checkpoints.glob("step-*") if (path / "MANIFEST.json").exists()]


async def asked_by_two(toy: Toy) -> tuple[dict[str, object], dict[str, object]]:
    """Ask for a precaution that goes on, and in mid-write, by another daemon, for an emergency that pauses."""
    options = llm(f"unix:{toy.socket}")
    async with effector(options) as (made, published), effector(options) as (other, _), asyncio.TaskGroup() as group:
        first = group.create_task(made.carry_out(order(60.0, name="a", after=Conduct.CONTINUE)))
        await until(lambda: "writing" in published.stages)
        second = group.create_task(other.carry_out(order(50.0, name="b", after=Conduct.PAUSE)))
    return dict(first.result()), dict(second.result())


async def test_two_daemons_make_one_checkpoint(folder: Path) -> None:
    """A precaution that goes on, then an emergency that pauses: joined in mid-write, paused at the step it saves."""
    for turn in range(5):  # on a busy machine the first one may be whole before the second is asked for
        (folder / str(turn)).mkdir()
        # A new one each time: one that knows how long it takes ends the first before it begins the second.
        with Toy(folder / str(turn), "--step-ms", "5", "--mb", "40", "--mb-per-s", "20") as toy:
            one, two = await asked_by_two(toy)
            whole = emergencies(toy)
        if one["path"] == two["path"]:
            break
    assert one["path"] == two["path"]
    assert (two["at_paused_step"], two["paused"], two["verified"]) == (True, True, True)
    # The precaution's own may have become whole before it was given up for the newer one.
    assert max(whole) == Path(str(two["path"]))


async def test_a_trainer_that_is_killed_and_restarted_is_asked_again(folder: Path) -> None:
    """Its supervisor is quicker than our next question: it knows nothing of the id, and makes the checkpoint anew."""
    with Toy(folder, "--step-ms", "5", "--mb", "60", "--mb-per-s", "10") as toy:
        async with effector(llm(f"unix:{toy.socket}")) as (made, published), asyncio.TaskGroup() as group:
            task = group.create_task(made.carry_out(order(100.0)))
            await until(lambda: "writing" in published.stages)
            toy.kill(signal.SIGSTOP)  # a question of ours is open: it fails when the process goes, and is asked again
            toy.socket.rename(folder / "old.sock")
            with Toy(folder, "--step-ms", "5", socket_name="toy.sock") as blocked:
                assert blocked.said == "", "the folder is locked for as long as the old one lives"
            with Toy(folder / "new", "--step-ms", "5", socket_name="../toy.sock") as again:
                toy.kill()
                detail = dict(await task)
                assert again.process.poll() is None
            assert (detail["verified"], detail["at_paused_step"]) == (True, True)
            assert str(detail["path"]).startswith(str(folder / "new"))


async def test_a_full_queue_is_a_hang_and_no_death(folder: Path) -> None:
    """A stopped trainer's listen queue fills up: connecting fails at once, yet the trainer is there."""
    path = folder / "llm.sock"
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as queue:
        server.bind(str(path))
        server.listen(0)
        for _ in range(3):
            waiting = queue.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
        async with effector(llm(f"unix:{path}")) as (made, published):
            with pytest.raises(EffectorError, match="out of time: its checkpoint is still hung"):
                await made.carry_out(order(1.5))
            await made.look()
            assert last(published).alive
