"""Two Redfish services: sushy-emulator, which shares no code with us, and our own where it has nothing to offer.

Ours is not independent: it holds what we hold true of ComputerSystem.PowerRestorePolicy, of ETags and of refusals.
"""

import asyncio
import base64
import hashlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from powerguard.effectors.options import BmcOptions
from powerguard.options import Secret
from tests.peers import require
from tests.peers.ipmi import keep_secret
from tests.peers.ports import free_port

USER: Final = "powerguard"
PASSWORD: Final = "a-Redfish-password-longer-than-IPMI-allows"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate for 127.0.0.1 that signed itself. sha256: its fingerprint."""

    cert: Path
    key: Path
    sha256: str


def make_certificate(folder: Path) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bmc.example")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "bmc.pem", folder / "bmc.key"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    sha256 = hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()
    return Certificate(cert=cert_path, key=key_path, sha256=sha256)


def redfish_options(folder: Path, https_port: int, certificate: Certificate, **more: Any) -> BmcOptions:  # noqa: ANN401
    """Settings for a service on 127.0.0.1 that is verified by its certificate, unless `more` says otherwise."""
    verify = {} if {"fingerprint", "ca"} & set(more) else {"ca": str(certificate.cert)}
    password = Secret(file=str(keep_secret(folder / "bmc-password", more.pop("password", PASSWORD))))
    given = {"kind": "redfish", "host": "127.0.0.1", "user": USER, "password": password, "https_port": https_port}
    return BmcOptions(**(given | verify | more))


@dataclass(kw_only=True)
class Faults:
    """How our own service misbehaves.

    answers: status of the next requests of a method, before it behaves again; retry_after: sent with them.
    always: the same, for ever. refused: status of single `resources`.
    bios: status of the BIOS resource, which many refuse without a license.
    if_match: "as sent" takes its own ETag as it sent it; "strong" takes it as RFC 9110 has it, so that a weak one
    matches nothing; "none" takes no If-Match at all.
    lie: a PATCH is acknowledged, not stored; said: what is answered to one.
    late_reads: so many reads still show the old.
    hang: "headers" sends them and half a body, then nothing; "answer" sends nothing at all.
    closes: a connection is good for one request, and that is not announced.
    closed_root: the root asks for the login, against DSP0266 13.3.1.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    always: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    bios: int = 200
    if_match: str = "as sent"
    retry_after: str | None = None
    lie: bool = False
    said: Mapping[str, object] | None = None
    late_reads: int = 0
    hang: str = ""
    hang_at: str = "/redfish/v1/Systems"
    closes: bool = False
    closed_root: bool = False
    body: bytes | None = None


class OwnRedfish:
    """`async with OwnRedfish(certificate) as bmc`: bmc.port, bmc.system (what it holds), bmc.heard (method, path).

    shape: "standard", "Hpe" and "Hp" (names in Oem), "dell" (a BIOS attribute alone), "none" (no property at all).
    """

    def __init__(
        self,
        certificate: Certificate,
        *,
        shape: str = "standard",
        policy: str = "LastState",
        systems: tuple[str, ...] = ("1",),
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.heard: list[str] = []
        self.port = 0
        self.password = PASSWORD
        self.system: dict[str, Any] = {"PowerState": "On", "Bios": {"@odata.id": "/redfish/v1/Systems/1/Bios"}}
        self.bios: dict[str, Any] = {"Attributes": {"BootMode": "Uefi"}}
        match shape:
            case "standard":
                self.system["PowerRestorePolicy"] = policy
            case "Hpe" | "Hp":
                self.system["Oem"] = {shape: {"PowerAutoOn": policy}}
            case "dell":
                self.bios["Attributes"]["AcPwrRcvry"] = policy
        target = f"/redfish/v1/Systems/{systems[0] if systems else 1}/Actions/ComputerSystem.Reset"
        self.reset: dict[str, Any] = {"target": target, "ResetType@Redfish.AllowableValues": ["On", "ForceOff"]}
        self.system["Actions"] = {"#ComputerSystem.Reset": self.reset}
        self.resets: list[str] = []
        self.system["Links"] = {"Chassis": [{"@odata.id": "/redfish/v1/Chassis/1"}]}
        self.resources: dict[str, dict[str, Any]] = {
            "/redfish/v1/": {"Systems": {"@odata.id": "/redfish/v1/Systems"}},
            "/redfish/v1/Chassis/1": {},
        }
        self.systems = systems
        self._version = 1
        self._before: dict[str, Any] = {}
        self.certificate = certificate
        self._used: set[object] = set()
        self._never = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._once])
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate.cert, self.certificate.key)
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._never.set()
        if self._runner is not None:
            await self._runner.cleanup()

    def count(self, method: str) -> int:
        return sum(line.startswith(f"{method} ") for line in self.heard)

    @web.middleware
    async def _once(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.faults.closes and request.transport is not None and request.protocol in self._used:
            request.transport.abort()
            return web.Response()
        self._used.add(request.protocol)
        return await handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.heard.append(f"{request.method} {request.path}")
        faults, method = self.faults, request.method
        assert request.headers["Accept-Encoding"] == "identity"
        if faults.hang and request.path == faults.hang_at:
            return await self._hang(request)
        queued = faults.answers.get(method, [])
        status = queued.pop(0) if queued else faults.always.get(method, 0)
        # The root is everybody's (DSP0266 13.3.1), and must not be given the login unless it asks for it.
        if request.path == "/redfish/v1/" and not faults.closed_root:
            assert "Authorization" not in request.headers
            return self._json(self.resources[request.path])
        if status == 412:
            self.touch()
        if status:
            headers = {} if faults.retry_after is None else {"Retry-After": faults.retry_after}
            if 300 <= status < 400:
                headers["Location"] = "/redfish/v1/elsewhere"
            more = [{"MessageId": "Base.1.8.GeneralError", "Message": "it said\x1b[2Jso"}]
            return web.json_response({"error": {"@Message.ExtendedInfo": more}}, status=status, headers=headers)
        login = "Basic " + base64.b64encode(f"{USER}:{self.password}".encode()).decode()
        if request.headers.get("Authorization") != login:
            return web.json_response({}, status=401)
        if faults.body is not None:
            return web.Response(body=faults.body, content_type="application/json")
        if request.path == "/redfish/v1/Systems":
            paths = [{"@odata.id": f"/redfish/v1/Systems/{name}"} for name in self.systems]
            return self._json({"Members": paths})
        if request.path in self.resources:
            refused = faults.refused.get(request.path)
            return web.json_response({}, status=refused) if refused else self._json(self.resources[request.path])
        if request.path.endswith("/Bios"):
            return self._json(self.bios) if faults.bios == 200 else web.json_response({}, status=faults.bios)
        if request.path.endswith("/Actions/ComputerSystem.Reset") and request.method == "POST":
            return await self._on_reset(request)
        return await self._of_system(request)

    async def _of_system(self, request: web.Request) -> web.StreamResponse:
        if request.path.rpartition("/")[2] not in self.systems:
            return web.json_response({}, status=404)
        etag = f'W/"{self._version}"'
        if request.method == "GET":
            if self._before and self.faults.late_reads:
                self.faults.late_reads -= 1
                return self._json(self._before, etag=etag)
            return self._json(self.system, etag=etag)
        wanted = {"as sent": etag, "strong": etag.removeprefix("W/"), "none": None}[self.faults.if_match]
        if request.headers.get("If-Match") != wanted:
            return web.json_response({}, status=412)
        self._version += 1
        self._before = json.loads(json.dumps(self.system))
        if not self.faults.lie:
            _merge(self.system, await request.json())
        return web.Response(status=204) if self.faults.said is None else web.json_response(self.faults.said)

    async def _on_reset(self, request: web.Request) -> web.StreamResponse:
        self.resets.append((await request.json())["ResetType"])
        if not self.faults.lie:
            self.system["PowerState"] = "On"
        return web.Response(status=204)

    def touch(self) -> None:
        """Somebody else has changed the system: its ETag is another."""
        self._version += 1

    def _json(self, body: dict[str, Any], *, etag: str = '"0"') -> web.Response:
        return web.json_response(body, headers={"ETag": etag})

    async def _hang(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if self.faults.hang == "headers":
            await response.prepare(request)
            await response.write(b'{"Members": [')
        await self._never.wait()
        return response


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


class SushyEmulator:
    """OpenStack's sushy-emulator with its fake driver: `async with SushyEmulator(folder, certificate, systems=1)`."""

    def __init__(self, folder: Path, certificate: Certificate, *, systems: int, power: str = "On") -> None:
        self._program = require("sushy-emulator")
        self._folder = folder
        self._certificate = certificate
        self._systems = systems
        self._power = power
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        systems = [
            {
                "uuid": f"00000000-0000-4000-8000-00000000000{n}",
                "name": f"node-{n}",
                "power_state": self._power,
                "nics": [],
            }
            for n in range(1, self._systems + 1)
        ]
        config = self._folder / "sushy.conf"
        self.port = free_port()
        given = {
            "SUSHY_EMULATOR_LISTEN_IP": "127.0.0.1",
            "SUSHY_EMULATOR_LISTEN_PORT": self.port,
            "SUSHY_EMULATOR_SSL_CERT": str(self._certificate.cert),
            "SUSHY_EMULATOR_SSL_KEY": str(self._certificate.key),
            "SUSHY_EMULATOR_FAKE_SYSTEMS": systems,
            "SUSHY_EMULATOR_STATE_DIR": str(self._folder),
        }
        config.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()))
        with (self._folder / "sushy.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._program, "--config", config, "--fake", stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(60):
                await self._listens()
        except TimeoutError:
            await self.__aexit__(None, None, None)
            pytest.fail((self._folder / "sushy.log").read_text(), pytrace=False)
        return self

    async def _listens(self) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                await writer.wait_closed()
                return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
