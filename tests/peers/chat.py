"""Chat and paging services as they answer: behind a forward proxy, which is how a test brings their names to this host.

The proxy takes CONNECT for their real names and speaks TLS with a certificate of an authority of the test. Answers are
those of the services' own documentation: a bot of DingTalk, WeCom or Feishu reports errors with status 200.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.peers.nut_tls import Authority

HOSTS = (
    "oapi.dingtalk.com",
    "open.feishu.cn",
    "qyapi.weixin.qq.com",
    "hooks.slack.com",
    "ntfy.sh",
    "events.pagerduty.com",
    "wxpusher.zjiecode.com",
)
Answer = tuple[int, object]


@dataclass
class Services:
    """All of them. taken: (host, body) of what was accepted. refusals: what the next requests are answered instead."""

    folder: Path
    secret: str = "SECabc123"
    keyword: str = "powerguard"
    taken: list[tuple[str, object]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    refusals: deque[Answer] = field(default_factory=deque)
    delay_s: float = 0.0
    port: int = 0

    def __post_init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self.authority = Authority(self.folder, "authority of the services")
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(*self.authority.files(*HOSTS))

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Services"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._exchange(reader, writer)
        finally:
            self._running.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host = head.split()[1].partition(":")[0]
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            await writer.start_tls(self._tls)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-le")
            )
            body = json.loads(await reader.readexactly(length))
            await asyncio.sleep(self.delay_s)
            status, result = self.answer(host, head.split()[1], body)
            data = result.encode() if isinstance(result, str) else json.dumps(result).encode()
            extra = "Location: https://elsewhere.example/\r\n" if status in (301, 307) else ""
            writer.write(
                f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
            )
            writer.write(data)
            await writer.drain()

    def answer(self, host: str, target: str, body: object) -> Answer:
        self.asked.append(host)
        if self.refusals:
            return self.refusals.popleft()
        answers: dict[str, Callable[[str, object], Answer]] = {
            "oapi.dingtalk.com": self._dingtalk,
            "open.feishu.cn": lambda _, asked: self._with_keyword(
                str(asked), {"code": 0, "msg": "success"}, {"code": 19024, "msg": "Key Words Not Found", "data": {}}
            ),
            "qyapi.weixin.qq.com": self._wecom,
            "hooks.slack.com": lambda *_: (200, "ok"),
            "ntfy.sh": lambda *_: (200, {"id": "x", "event": "message"}),
            "events.pagerduty.com": self._pagerduty,
            "wxpusher.zjiecode.com": lambda *_: (200, {"code": 1000, "msg": "处理成功", "success": True}),
        }
        status, result = answers[host](target, body)
        good_code = 1000 if host == "wxpusher.zjiecode.com" else 0
        bad = isinstance(result, dict) and (result.get("errcode") or result.get("code", good_code) != good_code)
        good = status in (200, 202) and not bad
        if good:
            self.taken.append((host, body))
        return status, result

    def _with_keyword(self, text: str, good: object, bad: object) -> Answer:
        return (200, good) if self.keyword in text else (200, bad)

    def _dingtalk(self, target: str, body: object) -> Answer:
        """Security by signature, where the request carries one; else by keyword."""
        result = parse_qs(urlsplit(target).query)
        if "sign" in result:
            stamp = result["timestamp"][0]
            key = self.secret.encode()
            mac = hmac.new(key, f"{stamp}\n{self.secret}".encode(), hashlib.sha256).digest()
            fresh = abs(time.time() * 1000 - int(stamp)) < 3_600_000
            if not fresh or result["sign"][0] != base64.b64encode(mac).decode():
                return 200, {"errcode": 310000, "errmsg": "sign not match"}
            return 200, {"errcode": 0, "errmsg": "ok"}
        bad = {"errcode": 310000, "errmsg": "keywords not in content"}
        return self._with_keyword(str(body), {"errcode": 0, "errmsg": "ok"}, bad)

    def _pagerduty(self, _: str, body: object) -> Answer:
        if len(_field(body, "payload", "summary")) > 1024:
            return 400, {"status": "invalid event", "errors": ["'payload.summary' is too long (maximum is 1024)"]}
        return 202, {"status": "success", "message": "Event processed"}

    def _wecom(self, target: str, body: object) -> Answer:
        if "key=good" not in target:
            return 200, {"errcode": 93000, "errmsg": "invalid webhook url"}
        if len(_field(body, "text", "content").encode()) > 2048:
            return 200, {"errcode": 40058, "errmsg": "invalid Request Parameter"}
        return 200, {"errcode": 0, "errmsg": "ok"}


def _field(body: object, *names: str) -> str:
    for name in names:
        body = body.get(name) if isinstance(body, dict) else None
    return str(body)
