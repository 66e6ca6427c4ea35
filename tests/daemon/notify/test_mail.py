"""Mail to a real SMTP server (aiosmtpd) with STARTTLS, and the program of one's own."""

import asyncio
import contextlib
import email
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session

from powerguard.core.model.actions import Level
from tests.daemon.notify.post import began, note, options, post, secret
from tests.peers.nut_tls import Authority
from tests.peers.ports import free_port

START_S = 60.0
"""For the mail server's thread to start: the 5 s of aiosmtpd are too few for a busy machine."""


class Mailbox:
    """Takes mail, unless told to answer something else."""

    def __init__(self) -> None:
        self.mails: list[Any] = []
        self.answer = "250 taken"
        self.encrypted: list[bool] = []

    async def handle_DATA(self, _: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd's
        if self.answer.startswith("250"):
            assert isinstance(envelope.content, bytes)
            self.mails.append(email.message_from_bytes(envelope.content, policy=default))
            self.encrypted.append(session.ssl is not None)
        return self.answer


class Server(Controller):
    """STARTTLS and a login are required, as a good server requires them."""

    def __init__(self, box: Mailbox, authority: Authority, name: str) -> None:
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(*authority.files(name))
        super().__init__(box, hostname="127.0.0.1", port=free_port(), ready_timeout=START_S)

    def factory(self) -> SMTP:
        return SMTP(
            self.handler,
            tls_context=self._tls,
            require_starttls=True,
            auth_required=True,
            authenticator=lambda _s, _m, _e, _k, given: AuthResult(
                success=given.password == b"hunter2-secret", handled=False
            ),
        )


@pytest.fixture
def box() -> Mailbox:
    return Mailbox()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(box: Mailbox, authority: Authority) -> Iterator[Server]:
    running = Server(box, authority, "127.0.0.1")
    running.start()
    yield running
    running.stop()


def mail(
    port: int, tmp_path: Path, authority: Authority, password: str = "hunter2-secret", **more: object
) -> dict[str, Any]:
    return {
        "kind": "mail",
        "host": "127.0.0.1",
        "port": port,
        "user": "powerguard",
        "password": secret(tmp_path, "mail-password", password),
        "sender": "powerguard@example.org",
        "to": ["ops@example.org", "night@example.org"],
        "ca_file": str(authority.pem),
        "limit_s": 20,
        **more,
    }


async def test_an_outage_arrives_as_mail(server: Server, box: Mailbox, authority: Authority, tmp_path: Path) -> None:
    async with post(options("zh", ops=mail(server.port, tmp_path, authority)), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: box.mails)
        got = box.mails[0]
        assert got["Subject"] == "gpu-01\uff1a已切换到电池供电"
        assert "市电中断" in got.get_content()
        assert (got["To"], got["Auto-Submitted"]) == ("ops@example.org, night@example.org", "auto-generated")
        await made.until(lambda: made.view("ops").delivered == 1)
        assert made.view("ops").answer == "accepted"
    assert box.encrypted == [True]


async def test_every_name_gives_a_whole_message_id(
    server: Server, box: Mailbox, authority: Authority, tmp_path: Path
) -> None:
    """A source, link or trainer may have a space, an @ or another script in its name."""
    names = ({"source": "nut:rack@10.0.0.6"}, {"part": "link enp1s0"}, {"trainer": "\u8bad\u7ec3"})
    async with post(options(ops=mail(server.port, tmp_path, authority)), tmp_path) as made:
        for name in names:
            made.hear(note("power_on_blocked" if "trainer" in name else "source_lost", Level.ERROR, **name))
        await made.until(lambda: len(box.mails) == len(names))
        assert made.view("ops").failed == 0
    ids = [str(each["Message-ID"]) for each in box.mails]
    assert all(re.fullmatch(r"<[0-9a-z.-]+@powerguard\.invalid>", each) for each in ids), ids
    assert len(set(ids)) == len(ids)


class Rude(Mailbox):
    """Takes mail, and then answers the client's goodbye with an error, or never."""

    def __init__(self, goodbye: str) -> None:
        super().__init__()
        self.goodbye = goodbye

    async def handle_QUIT(self, _: SMTP, __: Session, ___: Envelope) -> str:  # noqa: N802 - aiosmtpd's
        if not self.goodbye:
            await asyncio.sleep(60.0)
        return self.goodbye


@pytest.mark.parametrize("goodbye", ["421 too many connections", ""])
async def test_a_mail_that_was_taken_is_not_sent_again_for_a_lost_goodbye(
    goodbye: str, authority: Authority, tmp_path: Path
) -> None:
    """The server has answered for the mail by then: counted as failed, it would come every few minutes, for days."""
    box = Rude(goodbye)
    server = Server(box, authority, "127.0.0.1")
    server.start()
    try:
        async with post(options(ops=mail(server.port, tmp_path, authority)), tmp_path) as made:
            assert await made.messenger.test(["ops"], 30.0) == {"ops": (True, "accepted")}
    finally:
        server.stop()
    assert len(box.mails) == 1


async def test_refusals_are_reported(server: Server, box: Mailbox, authority: Authority, tmp_path: Path) -> None:
    wrong = mail(server.port, tmp_path, authority)
    async with post(options(ops=wrong), tmp_path) as made:
        box.answer = "552 the mailbox is full"
        assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, "552 the mailbox is full")}
    wrong = mail(server.port, tmp_path, authority, "wrong-secret-x")
    async with post(options(ops=wrong), tmp_path) as made:
        result = (await made.messenger.test(["ops"], 30.0))["ops"]
        assert result[0] is False
        assert result[1].startswith("535 ")


async def test_a_password_that_smtp_cannot_send_is_named(server: Server, authority: Authority, tmp_path: Path) -> None:
    """Else the answer is the name of an exception of Python's."""
    async with post(options(ops=mail(server.port, tmp_path, authority, "p\u00e4ssword")), tmp_path) as made:
        text = "its login takes only ASCII letters in user and password: give the account another password"
        assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, text)}


async def test_an_address_that_the_server_cannot_take_is_named(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    """STARTTLS and the login have worked, so the answer is not to send anyone there."""
    target = mail(server.port, tmp_path, authority, to=["ops@b\u00fccher.example"])
    async with post(options(ops=target), tmp_path) as made:
        text = "it takes only ASCII letters in addresses: write a domain in its form that begins with xn--"
        assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, text)}


async def test_a_wrong_certificate_ends_it_before_the_login(box: Mailbox, authority: Authority, tmp_path: Path) -> None:
    server = Server(box, authority, "other.example")
    server.start()
    try:
        async with post(options(ops=mail(server.port, tmp_path, authority)), tmp_path) as made:
            result = (await made.messenger.test(["ops"], 30.0))["ops"]
            assert result[0] is False
            assert result[1].startswith("its certificate does not verify (IP address mismatch")
    finally:
        server.stop()
    assert box.mails == []


async def test_a_ca_file_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    """Else a mistyped path gives the name of an exception, and no mail in an outage."""
    no_file, no_pem = tmp_path / "none.pem", tmp_path / "text.pem"
    no_pem.write_text("no certificate\n", encoding="ascii")
    for path, why in ((no_file, "No such file or directory"), (no_pem, "cannot be read as certificates")):
        async with post(options(ops=mail(1, tmp_path, authority, ca_file=str(path))), tmp_path) as made:
            assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, f"{path}: {why}")}


async def test_a_server_without_starttls_gets_no_password(box: Mailbox, authority: Authority, tmp_path: Path) -> None:
    server = Controller(box, hostname="127.0.0.1", port=free_port(), ready_timeout=START_S)
    server.start()
    try:
        async with post(options(ops=mail(server.port, tmp_path, authority)), tmp_path) as made:
            text = "it does not offer STARTTLS or a login that we know: see tls and port"
            assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, text)}
        plain = {**mail(server.port, tmp_path, authority), "tls": "none", "user": None, "password": None}
        async with post(options(ops=plain), tmp_path) as made:
            assert await made.messenger.test(["ops"], 30.0) == {"ops": (True, "accepted")}
    finally:
        server.stop()
    assert len(box.mails) == 1


async def test_nobody_there(authority: Authority, tmp_path: Path) -> None:
    async with post(options(ops=mail(free_port(), tmp_path, authority)), tmp_path) as made:
        text = "no mail server answers (Connection refused)"
        assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, text)}


async def test_a_server_that_drips_is_left_at_the_limit(authority: Authority, tmp_path: Path) -> None:
    """A byte a second: each read succeeds, and the whole never ends. The child is killed, and none is left."""

    came, gone = asyncio.Event(), asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        with contextlib.suppress(OSError):
            for byte in b"220 a very slow server indeed\r\n":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
        writer.close()
        gone.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for limit_s in (3, 10, 25):  # on a busy machine the child may need more than the first to connect
            async with post(options(ops=mail(port, tmp_path, authority, limit_s=limit_s)), tmp_path) as made:
                assert await made.messenger.test(["ops"], 30.0) == {"ops": (False, f"no answer within {limit_s} s")}
            if came.is_set():
                break
        assert came.is_set()
        await gone.wait()


@pytest.mark.root
@pytest.mark.peer("unshare", "ip", "hostname")
@pytest.mark.parametrize(("kind", "answer"), [("mail", "accepted"), ("apprise", "sent")])
def test_a_host_whose_dns_is_dead_sends_mail(tmp_path: Path, kind: str, answer: str) -> None:
    """Its own name is known to DNS alone, which hangs for longer than a mail may take."""
    child = [sys.executable, str(Path(__file__).with_name("mail_child.py")), str(tmp_path), kind]
    ended = subprocess.run(
        ["unshare", "-n", "-u", "-m", *child], check=False, capture_output=True, text=True, timeout=200
    )
    if ended.returncode and "Operation not permitted" in ended.stderr:
        pytest.skip("may not make namespaces here")
    assert json.loads(ended.stdout) == {"ok": True, "answer": answer, "refused": False}, ended.stderr


def command(*words: str, **more: object) -> dict[str, Any]:
    return {"kind": "command", "command": list(words), "limit_s": 30, **more}


async def test_a_program_of_ones_own_gets_the_message(tmp_path: Path) -> None:
    target = command("/bin/sh", "-c", 'cat > "$0"; echo paged', str(tmp_path / "got"))
    async with post(options(own=target), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view("own").delivered == 1)
        assert made.view("own").answer == "exit status 0: paged"
        assert json.loads((tmp_path / "got").read_text(encoding="utf-8"))["event"] == "outage_began"


COMMANDS = [
    (("/bin/sh", "-c", "echo no credit >&2; exit 3"), "exit status 3: no credit"),
    ((sys.executable, "-c", "print('sends'); 1 / 0"), "exit status 1: ZeroDivisionError: division by zero"),
    (("/bin/sh", "-c", "sleep 30"), "no answer within 2 s"),
    (("/no/such-program",), "such-program: No such file or directory"),
]


@pytest.mark.parametrize(("words", "expected"), COMMANDS, ids=[each for _, each in COMMANDS])
async def test_a_program_that_fails_is_reported(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    async with post(options(own=command(*words, limit_s=2 if "no answer" in expected else 30)), tmp_path) as made:
        began_s = time.monotonic()
        assert await made.messenger.test(["own"], 30.0) == {"own": (False, expected)}
        assert time.monotonic() - began_s < 20


async def test_a_program_that_leaves_a_child_behind_has_delivered(tmp_path: Path) -> None:
    """The child keeps the program's output open: else the same message would be sent again and again."""
    for limit_s in (2, 10, 25):  # on a busy machine the shell may need more than the first
        target = command("/bin/sh", "-c", "sleep 60 & echo paged", limit_s=limit_s)
        async with post(options(own=target), tmp_path) as made:
            found = [(await made.messenger.test(["own"], most_s))["own"] for most_s in (30.0, limit_s / 2)]
        if all(is_delivered for is_delivered, _ in found):
            break
    assert found == [(True, "exit status 0: paged")] * 2
