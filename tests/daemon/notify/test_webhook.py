"""Webhooks, a local aiohttp receiver as the other side, and what it may do to us."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from powerguard.core.model.actions import Level
from powerguard.daemon.notify.answer import one_line, redact
from powerguard.daemon.notify.targets import RESEND_S
from powerguard.daemon.observe.readiness import UNREACHED_S
from tests.daemon.notify.post import Clock, Post, began, ended, note, options, post, secret
from tests.peers.nut_tls import Authority
from tests.peers.ports import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/services/T0SECRET/B0SECRET"


@dataclass
class Receiver:
    """Takes every POST; answers what it is told to."""

    bodies: list[str] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    answer: Callable[[], web.Response] = field(default=lambda: web.Response(text="ok"))
    url: str = ""
    hangs: bool = False
    first_waits: asyncio.Event | None = None
    elsewhere: str = ""
    is_dated: bool = True

    async def take(self, request: web.Request) -> web.StreamResponse:
        if self.hangs:
            await asyncio.sleep(60)
        if self.elsewhere:
            raise web.HTTPTemporaryRedirect(self.elsewhere)
        self.bodies.append(await request.text())
        self.headers.append(request.headers)
        if self.first_waits is not None and len(self.bodies) == 1:
            await self.first_waits.wait()
        return self.answer()

    async def prepare(self, _: web.Request, answer: web.StreamResponse) -> None:
        if not self.is_dated:
            del answer.headers["Date"]

    async def drip(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(60):
            await answer.write(b".")
            await asyncio.sleep(1)
        return answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]


async def serve(receiver: Receiver, tls: ssl.SSLContext | None = None) -> web.AppRunner:
    app = web.Application()
    app.router.add_post(PATH, receiver.take)
    app.router.add_post("/drip", receiver.drip)
    app.router.add_post("/api/v2/alerts", receiver.take)
    app.on_response_prepare.append(receiver.prepare)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    receiver.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    return runner


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    runner = await serve(made)
    yield made
    await runner.cleanup()


def hook(receiver: Receiver, folder: Path, path: str = PATH, **more: object) -> dict[str, Any]:
    return {"kind": "webhook", "url": secret(folder, "hook-url", receiver.url + path), "limit_s": 30, **more}


async def test_an_outage_arrives_as_json(receiver: Receiver, tmp_path: Path) -> None:
    """All fields, in the order of events, and the queue is empty afterwards."""
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        made.hear(*began())
        made.hear(*ended())
        await made.until(lambda: len(receiver.bodies) == 2)
        first, last = receiver.messages
        assert (first["object"], first["event"], first["status"], first["host"]) == (
            "message",
            "outage_began",
            "begin",
            "gpu-01",
        )
        assert first["numbers"]["charge_pct"] == 97.0
        assert (last["event"], last["status"], last["key"]) == ("ridden_through", "end", first["key"])
        await made.until(lambda: made.view("hook").queued == 0)
        assert (made.view("hook").delivered, made.view("hook").failed) == (2, 0)


async def test_a_template_makes_the_body(receiver: Receiver, tmp_path: Path) -> None:
    """What comes from outside cannot break out of the JSON string that it is put in."""
    template = tmp_path / "slack.json"
    template.write_text('{"text": "$title\\n${text} for $$5", "because": "$because"}', encoding="utf-8")
    bearer = secret(tmp_path, "bearer", "Bearer abc")
    target = hook(receiver, tmp_path, template=str(template), authorization=bearer)
    async with post(options(hook=target), tmp_path) as made:
        made.hear(note("overload_raised", Level.ERROR, 'a "quoted" \\ text'))
        await made.until(lambda: receiver.bodies)
        assert receiver.messages[0]["because"] == 'a "quoted" \\ text'
        assert receiver.messages[0]["text"].endswith("for $5")
        assert receiver.headers[0]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "application/cloudevents+json", "text/json"]
)
async def test_a_template_of_json_stays_json(receiver: Receiver, tmp_path: Path, content_type: str) -> None:
    template = tmp_path / "event.json"
    template.write_text('{"text": "$because"}', encoding="utf-8")
    target = hook(receiver, tmp_path, template=str(template), content_type=content_type)
    async with post(options(hook=target), tmp_path) as made:
        made.hear(note("overload_raised", Level.ERROR, 'a "quote" and a \\'))
        await made.until(lambda: made.view("hook").delivered)
        assert receiver.messages == [{"text": 'a "quote" and a \\'}]


async def test_a_template_that_went_missing_is_reported_and_retried(receiver: Receiver, tmp_path: Path) -> None:
    template = tmp_path / "gone.json"
    async with post(options(hook=hook(receiver, tmp_path, template=str(template))), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view("hook").failed)
        assert made.view("hook").answer == f"{template}: No such file or directory"
        template.write_text('{"text": "$title"}', encoding="utf-8")
        await made.until(lambda: receiver.bodies)
        assert receiver.messages == [{"text": "gpu-01: on battery"}]


ANSWERS = [
    (web.Response, {"status": 404, "text": "no_service"}, "404 no_service"),
    (web.Response, {"status": 500, "text": "oops\nmore"}, "500 oops more"),
    (web.Response, {"status": 400, "text": '{\n  "error": "unknown room"\n}\n'}, '400 { "error": "unknown room" }'),
    (web.json_response, {"data": {"errcode": 310000, "errmsg": "sign"}}, '200 {"errcode": 310000, "errmsg": "sign"}'),
    (web.json_response, {"data": {"ok": False, "error": "x"}}, '200 {"ok": false, "error": "x"}'),
    (web.json_response, {"data": {"code": 19001, "msg": "x"}}, '200 {"code": 19001, "msg": "x"}'),
    (web.json_response, {"data": {"code": 1000, "msg": "x"}}, '200 {"code": 1000, "msg": "x"}'),  # WxPusher has success
]


@pytest.mark.parametrize(
    ("make", "how", "expected"), ANSWERS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_a_refusal_is_shown_as_it_was_said(
    receiver: Receiver, tmp_path: Path, make: Callable[..., web.Response], how: dict[str, Any], expected: str
) -> None:
    receiver.answer = lambda: make(**how)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, expected)}


async def test_a_hanging_and_a_dripping_target_end_at_the_limit(receiver: Receiver, tmp_path: Path) -> None:
    async with post(options(hook=hook(receiver, tmp_path, "/drip", limit_s=2)), tmp_path) as made:
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, "no answer within 2 s")}
    receiver.hangs = True
    async with post(options(hook=hook(receiver, tmp_path, limit_s=2)), tmp_path) as made:
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, "no answer within 2 s")}


async def test_a_proxy_that_refuses_or_is_not_there_is_named(tmp_path: Path) -> None:
    """Else it looks as if the service itself did not answer."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = secret(tmp_path, "url", "https://hooks.example.org/x")
        ports = {"refuses": server.sockets[0].getsockname()[1], "gone": free_port()}
        targets = {
            name: {"kind": "webhook", "url": url, "limit_s": 30, "proxy": f"http://127.0.0.1:{port}"}
            for name, port in ports.items()
        }
        async with post(options(**targets), tmp_path) as made:
            assert await made.messenger.test(targets, 30.0) == {
                "refuses": (False, "its proxy refuses the connection (HTTP 407)"),
                "gone": (False, "no connection to its proxy (ECONNREFUSED)"),
            }


async def test_redirects_are_not_followed(receiver: Receiver, tmp_path: Path) -> None:
    """To no other host, which would get what is meant for this one; nor to another path."""
    other = Receiver()
    runner = await serve(other)
    for there in (other.url + PATH, PATH):
        receiver.elsewhere = there
        async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
            expected = {"hook": (False, "redirects elsewhere: not followed (store the new address)")}
            assert await made.messenger.test(["hook"], 30.0) == expected
    await runner.cleanup()
    assert other.bodies == []


async def test_nobody_there(tmp_path: Path) -> None:
    refused = Receiver(url="http://127.0.0.1:9")
    async with post(options(hook=hook(refused, tmp_path)), tmp_path) as made:
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, "no connection (ECONNREFUSED)")}
    nowhere = Receiver(url="http://no-such-name.invalid")
    async with post(options(hook=hook(nowhere, tmp_path)), tmp_path) as made:
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, "its name does not resolve")}


@pytest.mark.parametrize("url", ["slack://T1/B2/C3", "hooks.slack.example/T1", "http:/hooks.example", "h ttp://x"])
async def test_a_url_that_is_none_is_named(tmp_path: Path, url: str) -> None:
    """An Apprise URL in a webhook, or one without its beginning: once, only the name of an exception was shown."""
    async with post(options(hook=hook(Receiver(url=url), tmp_path)), tmp_path) as made:
        (found,) = (await made.messenger.test(["hook"], 30.0)).values()
    assert found == (False, "its URL is not one (http://... or https://...)")


async def test_a_certificate_is_verified(tmp_path: Path) -> None:
    """Verification is on; an expired one, and one of an authority that is not named, are not believed."""
    authority = Authority(tmp_path)
    for days, names, expected in (
        (7, ("127.0.0.1",), (True, "200 ok")),
        (-7, ("127.0.0.1",), (False, "its certificate does not verify (certificate has expired): see ca_file")),
        (7, ("other.example",), None),
    ):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*authority.files(*names, days=days))
        receiver = Receiver()
        runner = await serve(receiver, tls)
        async with post(options(hook=hook(receiver, tmp_path, ca_file=str(authority.pem))), tmp_path) as made:
            found = (await made.messenger.test(["hook"], 30.0))["hook"]
            assert found == expected if expected else (found[0] is False and "does not verify" in found[1])
        async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
            assert (await made.messenger.test(["hook"], 30.0))["hook"][0] is False
        await runner.cleanup()
    async with post(options(hook=hook(receiver, tmp_path, ca_file=str(tmp_path / "none.pem"))), tmp_path) as made:
        none = f"{tmp_path / 'none.pem'}: No such file or directory"
        assert await made.messenger.test(["hook"], 30.0) == {"hook": (False, none)}


async def test_an_authority_that_was_replaced_on_disk_is_read_at_the_next_try(tmp_path: Path) -> None:
    """Its file is what the failure names, so the test that follows must not still hold the old one against it."""
    receiver, authority = Receiver(), Authority(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.files("127.0.0.1"))
    runner = await serve(receiver, tls)
    believed = tmp_path / "ca.pem"
    believed.write_bytes(Authority(tmp_path, "the one before").pem.read_bytes())
    async with post(options(hook=hook(receiver, tmp_path, ca_file=str(believed))), tmp_path) as made:
        assert (await made.messenger.test(["hook"], 30.0))["hook"][0] is False
        believed.write_bytes(authority.pem.read_bytes())
        assert (await made.messenger.test(["hook"], 30.0))["hook"] == (True, "200 ok")
    await runner.cleanup()


async def test_no_secret_gets_out(receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not by an error, an answer that echoes it, the queue, the views or the log."""
    caplog.set_level(logging.DEBUG)
    receiver.answer = lambda: web.Response(status=403, text=f"forbidden: {receiver.url}{PATH}")
    wrong = secret(tmp_path, "wrong-url", "https://T0SECRET B0SECRET/")
    bad = {"kind": "webhook", "url": wrong}
    secret(tmp_path, "open-url", "http://x/T0SECRET")
    (tmp_path / "open-url").chmod(0o644)
    readable = {"kind": "webhook", "url": {"file": str(tmp_path / "open-url")}}
    targets = {"echo": hook(receiver, tmp_path), "wrong": bad, "open": readable}
    async with post(options(**targets), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: all(view.failed for view in made.messenger.views()))
        result = json.dumps([str(view) for view in made.messenger.views()]) + str(made.messenger.pending(100))
        result += str(await made.messenger.test(list(targets), 30.0))
        assert "forbidden: [redacted]" in made.view("echo").answer
        assert "other users can read this secret" in made.view("open").answer
    assert "SECRET" not in result
    assert "SECRET" not in caplog.text
    assert not any(b"SECRET" in path.read_bytes() for path in Path.glob(tmp_path, "messages.sqlite*"))


@pytest.mark.parametrize(
    ("text", "secret", "shown"),
    [
        ("invalid token TOKEN123", "Bearer TOKEN123", "invalid token [redacted]"),
        ("no Token123 here", "Bearer TOKEN123", "no [redacted] here"),
        ("who is watch:dog42x?", "Basic d2F0Y2g6ZG9nNDJ4", "who is [redacted]?"),
        (f"{'x' * 150} S3CRETS3CRET", "https://h/S3CRETS3CRET", f"{'x' * 150} [redacted"),
        ("no_service", "https://h/services/T1", "no_service"),
    ],
)
def test_an_answer_shows_no_part_of_a_secret(text: str, secret: str, shown: str) -> None:
    assert one_line(text.encode(), [secret]) == shown
    assert "S3CRET" not in redact(one_line(text.encode()), [secret])


async def test_an_answer_that_is_late_shows_no_secret_that_has_changed_since(
    receiver: Receiver, tmp_path: Path
) -> None:
    """A second message is sent, with a new token, while the answer to the first one, with the old token, is late."""
    receiver.answer = lambda: web.Response(status=403, text="invalid token OLD-TOKEN-1")
    receiver.first_waits = asyncio.Event()
    authorized = hook(receiver, tmp_path) | {"authorization": secret(tmp_path, "token", "OLD-TOKEN-1")}
    async with post(options(hook=authorized), tmp_path) as made:
        first = asyncio.ensure_future(made.messenger.test(["hook"], 30.0))
        await made.until(lambda: receiver.bodies)
        secret(tmp_path, "token", "NEW-TOKEN-2")
        await made.messenger.test(["hook"], 30.0)
        receiver.first_waits.set()
        assert (await first)["hook"][1] == "403 invalid token [redacted]"


async def test_order_is_kept_and_a_failure_is_retried(receiver: Receiver, tmp_path: Path) -> None:
    """The first one fails twice: the others wait for it, and nothing arrives twice."""
    answers = iter([web.Response(status=503), web.Response(status=429, headers={"Retry-After": "1"})])
    receiver.answer = lambda: next(answers, web.Response())
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        for number in range(5):
            made.hear(note("power_on_blocked", because=f"{number}", method=f"w{number}"))
        await made.until(lambda: made.view("hook").delivered == 5)
        assert [message["because"] for message in receiver.messages] == ["0", "0", "0", "1", "2", "3", "4"]
        assert (made.view("hook").failed, made.view("hook").since) == (2, None)


@pytest.mark.parametrize(
    "answer",
    [
        {"code": 201, "msg": "Created"},
        {"code": 20000, "msg": "success", "data": None},
        {"code": 1, "msg": "OK"},
        {"code": "SUCCESS", "msg": "\u6210\u529f"},
    ],
    ids=lambda each: str(each["code"]),
)
async def test_a_service_that_reports_success_in_its_own_words_gets_a_message_once(
    receiver: Receiver, tmp_path: Path, answer: dict[str, object]
) -> None:
    """Its codes are not those of a chat bot; taken for an error, each message would arrive for an hour."""
    receiver.answer = lambda: web.json_response(answer)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view("hook").delivered or made.view("hook").failed)
        assert (made.view("hook").delivered, made.view("hook").failed) == (1, 0)


async def test_a_new_message_is_a_reason_to_try_sooner(receiver: Receiver, tmp_path: Path) -> None:
    """A target that was away for hours is asked every ten minutes; a new outage does not wait for that."""
    receiver.answer = lambda: web.Response(status=503)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        made.hear(note("overload_raised", Level.ERROR))
        await made.until(lambda: made.view("hook").failed == 4)  # 1 + 2 + 4 s are over; the next rest is 8 s or more
        receiver.answer = web.Response
        began_s = time.monotonic()
        made.hear(*began())
        await made.until(lambda: made.view("hook").queued == 0)
        assert time.monotonic() - began_s < 7


def alerts_in(body: str) -> dict[str, tuple[datetime, datetime]]:
    """Return start and end of each alert that was sent."""
    return {
        each["labels"]["alertname"]: (datetime.fromisoformat(each["startsAt"]), datetime.fromisoformat(each["endsAt"]))
        for each in json.loads(body)
    }


async def next_turn(made: Post, name: str) -> None:
    """Wake the target's task, and wait until it has ended what it was at."""
    made.messenger._arrived[name].set()
    await made.until(lambda: not made.messenger._arrived[name].is_set())


async def refreshed(made: Post, receiver: Receiver) -> dict[str, tuple[datetime, datetime]]:
    """Wait until the alerts that stand have been sent once more; return what was sent last."""
    sent = len(receiver.bodies)
    await next_turn(made, "alerts")
    await made.until(lambda: len(receiver.bodies) > sent, "the alerts to be sent again")
    await next_turn(made, "alerts")
    return alerts_in(receiver.bodies[-1])


@pytest.mark.parametrize("is_dated", [True, False])
async def test_alerts_are_sent_again_after_the_clock_was_set_back(
    receiver: Receiver, tmp_path: Path, is_dated: bool
) -> None:
    """Else they would end by themselves in Alertmanager, for as long as the clock was ahead.

    By the Date of its answer they end when they should, also before the clock is set. A proxy may leave the Date out.
    """
    receiver.is_dated = is_dated
    clock = Clock(ahead_s=86400.0)
    target = {"kind": "alertmanager", "url": receiver.url, "limit_s": 30}
    async with post(options(alerts=target), tmp_path, clock) as made:
        made.hear(*began())
        await made.until(lambda: made.view("alerts").delivered == 1)
        _, end = (await refreshed(made, receiver))["PowerguardOutage"]
        assert (end - datetime.now(UTC) < timedelta(minutes=7)) == is_dated
        clock.ahead_s = 0.0
        _, end = (await refreshed(made, receiver))["PowerguardOutage"]
        assert timedelta(minutes=2) < end - datetime.now(UTC) < timedelta(minutes=7)


async def test_an_alert_that_lasts_keeps_its_start(receiver: Receiver, tmp_path: Path) -> None:
    """It is sent again each minute with a later end. Alertmanager would hide a later start: it keeps the first one."""
    receiver.is_dated = False  # its clock does not pass with the test's
    clock = Clock()
    target = {"kind": "alertmanager", "url": receiver.url, "limit_s": 30}
    async with post(options(alerts=target), tmp_path, clock) as made:
        made.hear(*began())
        made.hear(note("overload_raised", Level.ERROR))
        await made.until(lambda: made.view("alerts").delivered == 2)
        sent = [alerts_in(receiver.bodies[-1])]
        for _ in range(2):
            clock.passed_s += 2 * RESEND_S
            sent.append(await refreshed(made, receiver))
        for name in ("PowerguardOutage", "PowerguardOverload"):
            starts, ends = zip(*(each[name] for each in sent), strict=True)
            assert len(set(starts)) == 1, name
            assert all(later - end > timedelta(seconds=RESEND_S) for end, later in pairwise(ends)), name
        made.hear(*ended())
        await made.until(lambda: made.view("alerts").delivered == 3)
        _, end = alerts_in(receiver.bodies[-1])["PowerguardOutage"]
        assert end < sent[-1]["PowerguardOutage"][1]
        clock.passed_s += 2 * RESEND_S
        assert set(await refreshed(made, receiver)) == {"PowerguardOverload"}


@pytest.mark.parametrize(("alarms", "expected"), [("none", set()), ("error", {"PowerguardOverload"})])
async def test_alerts_that_are_sent_again_are_those_that_the_target_gets(
    receiver: Receiver, tmp_path: Path, alarms: str, expected: set[str]
) -> None:
    target = {"kind": "alertmanager", "url": receiver.url, "limit_s": 30, "alarms": alarms}
    async with post(options(alerts=target), tmp_path) as made:
        made.hear(note("overload_raised", Level.ERROR))
        made.hear(note("power_on_stuck_raised"))
        made.hear(*began())
        await made.until(lambda: made.view("alerts").delivered == 1 + len(expected))
        assert set(await refreshed(made, receiver)) == {"PowerguardOutage"} | expected


async def test_begin_and_end_that_are_late_become_one(receiver: Receiver, tmp_path: Path) -> None:
    """Of an outage all its messages, with their times; another one that stands is told as late."""
    clock = Clock()
    receiver.answer = lambda: web.Response(status=503)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(*began())
        made.hear(note("host_returned", Level.INFO, "powered off by us", outage="o1", away_s=900.0))
        made.hear(*ended(outcome="clean_shutdown"))
        made.hear(note("overload_raised", Level.ERROR), outage="")
        await made.until(lambda: made.view("hook").queued == 4)
        await made.until(lambda: made.view("hook").failed)
        receiver.bodies.clear()
        receiver.answer = web.Response
        clock.passed_s += 700.0
        await made.until(lambda: made.view("hook").queued == 0)
        together, late = receiver.messages
        assert together["event"] == "clean_shutdown"
        assert [each in together["text"] for each in ("on battery", "is back", "training resumed")] == [True] * 3
        assert together["level"] == "warning"
        assert "This happened at" in late["text"]


async def test_many_late_messages_of_an_outage_arrive_whole(receiver: Receiver, tmp_path: Path) -> None:
    """As many as one message holds become one; its end is not cut off."""
    clock = Clock()
    receiver.answer = lambda: web.Response(status=503)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(*began())
        for number in range(20):
            made.hear(note("power_on_blocked", because=f"cause {number}: " + "x" * 560, method=f"m{number}"))
        made.hear(*ended())
        await made.until(lambda: made.view("hook").queued == 22 and made.view("hook").failed)
        receiver.bodies.clear()
        receiver.answer = web.Response
        clock.passed_s += 700.0
        await made.until(lambda: made.view("hook").queued == 0)
        texts = "\n".join(message["text"] for message in receiver.messages)
        assert [number for number in range(20) if f"cause {number}:" not in texts] == []
        assert "Training never stopped" in texts
        assert len(receiver.messages) < 22


async def test_what_a_target_refuses_for_an_hour_is_dropped(receiver: Receiver, tmp_path: Path) -> None:
    """Meanwhile the other messages go past it."""
    clock = Clock()
    receiver.answer = lambda: web.Response(status=400 if "poison" in receiver.bodies[-1] else 200)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(note("overload_raised", Level.ERROR, "poison"))
        await made.until(lambda: made.view("hook").failed >= 1)
        made.hear(*began(), *ended())
        await made.until(lambda: made.view("hook").delivered == 2)
        assert (made.view("hook").dropped, made.view("hook").queued) == (0, 1)
        assert [each["event"] for each in receiver.messages if "poison" not in each["because"]] == [
            "outage_began",
            "ridden_through",
        ]
        clock.passed_s += 3700.0
        made.hear(note("power_on_blocked", because="next"))
        await made.until(lambda: made.view("hook").delivered == 3)
        await made.until(lambda: made.view("hook").queued == 0)
        assert made.view("hook").dropped == 1


async def test_a_target_that_refused_everything_gets_it_in_order(receiver: Receiver, tmp_path: Path) -> None:
    """As with an expired token, once it is renewed."""
    receiver.answer = lambda: web.Response(status=401)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        for cause in ("one", "two", "three"):
            made.hear(note("power_on_blocked", because=cause, method=cause))
        await made.until(lambda: {each["because"] for each in receiver.messages} == {"one", "two", "three"})
        await made.until(lambda: made.view("hook").failed >= 3)
        receiver.bodies.clear()
        receiver.answer = web.Response
        made.messenger._arrived["hook"].set()
        await made.until(lambda: made.view("hook").delivered == 3)
        assert [each["because"] for each in receiver.messages[-3:]] == ["one", "two", "three"]


@pytest.mark.parametrize("set_s", [86400.0, -86400.0])
async def test_a_clock_that_is_set_changes_no_failure(receiver: Receiver, tmp_path: Path, set_s: float) -> None:
    """As after a boot with an empty clock battery: no target has failed for a day, and no message is given up."""
    clock = Clock()
    receiver.answer = lambda: web.Response(status=400)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(note("overload_raised", Level.ERROR))
        await made.until(lambda: made.view("hook").failed >= 1)
        clock.ahead_s += set_s
        await made.until(lambda: made.view("hook").failed >= 3)
        view = made.view("hook")
        assert (view.dropped, view.queued) == (0, 1)
        assert view.since is not None
        assert 0.0 <= clock() - view.since < UNREACHED_S
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        kept = made.view("hook").since
        assert kept is not None
        assert 0.0 <= clock() - kept < UNREACHED_S


@pytest.mark.parametrize("set_s", [3 * 365 * 86400.0, -86400.0])
async def test_a_clock_that_is_set_changes_no_time_of_what_waits(
    receiver: Receiver, tmp_path: Path, set_s: float
) -> None:
    """With an empty clock battery a host begins years ago, and no certificate is valid until its clock is set."""
    clock = Clock(ahead_s=-set_s)
    receiver.answer = lambda: web.Response(status=503)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(note("host_returned", Level.INFO, "powered off by us", outage="o1", away_s=900.0))
        await made.until(lambda: made.view("hook").failed)
        clock.ahead_s = 0.0
        age_s = made.view("hook").oldest_age_s
        assert age_s is not None
        assert age_s < 60.0
        receiver.answer = web.Response
        await made.until(lambda: made.view("hook").queued == 0)
        back = receiver.messages[-1]
        assert abs(back["at"] - time.time()) < 60.0
        assert "This happened at" not in back["text"]


async def test_a_clock_that_is_set_changes_no_time_in_the_file(receiver: Receiver, tmp_path: Path) -> None:
    """The next daemon would take what was made a minute ago for three years old, and forget it."""
    clock = Clock(ahead_s=-3 * 365 * 86400.0)
    receiver.answer = lambda: web.Response(status=503)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        made.hear(note("host_returned", Level.INFO, "powered off by us", outage="o1", away_s=900.0))
        await made.until(lambda: made.view("hook").failed)
        clock.ahead_s = 0.0
        await made.until(lambda: made.view("hook").failed > 1)
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path, clock) as made:
        assert made.view("hook").queued == 1
        receiver.answer = web.Response
        await made.until(lambda: made.view("hook").queued == 0)
        assert receiver.messages[-1]["event"] == "host_returned"


async def test_a_reload_takes_new_targets(receiver: Receiver, tmp_path: Path) -> None:
    """Messages for a target that is gone are forgotten; those of one that stays are not."""
    receiver.answer = lambda: web.Response(status=503)
    targets = {"old": hook(receiver, tmp_path), "kept": hook(receiver, tmp_path)}
    async with post(options(**targets), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: all(view.failed for view in made.messenger.views()))
        receiver.answer = web.Response
        made.messenger.use(options("zh", kept=targets["kept"], new=targets["old"]))
        made.hear(*ended())
        await made.until(lambda: made.view("kept").delivered == 2 and made.view("new").delivered == 1)
        assert [view.name for view in made.messenger.views()] == ["kept", "new"]
        assert receiver.messages[-1]["title"] == "gpu-01\uff1a市电已恢复"


async def test_a_flood_is_summed_up(receiver: Receiver, tmp_path: Path) -> None:
    """A thousand different alarms at once: sixty are told, the rest is one message; the outage gets through."""
    async with post(options(hook=hook(receiver, tmp_path)), tmp_path) as made:
        for number in range(1000):
            made.hear(note("power_on_blocked", because=f"{number}", method=f"w{number}"))
        made.hear(*began())
        await made.until(lambda: any(message["event"] == "outage_began" for message in receiver.messages))
        await made.until(lambda: made.view("hook").queued == 0)
        assert len(receiver.bodies) == 61
        assert made.messenger.composer.left_out == {"power_on_blocked": 940}
