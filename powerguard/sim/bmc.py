"""A simulated BMC that speaks RMCP+, for the demo: pyghmi's server, completed, in a process of its own.

It is not independent of our client (both are pyghmi); tests that must be independent use OpenIPMI's ipmi_sim.
What stock pyghmi 1.6.19 lacks, measured: its server knows no power restore policy, answers every proposal with cipher
suite 3 while its client believes that it was given what it asked for, and never answers a user that it does not know.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn, Self

from powerguard.effectors.bmc.ipmi import PowerRestorePolicy, set_policy
from powerguard.effectors.child import clean_environment

_CHASSIS: Final = 0x00
_GET_CHASSIS_STATUS: Final = (_CHASSIS, 0x01)
_SET_POLICY: Final = (_CHASSIS, 0x06)
_GET_RESTART_CAUSE: Final = (_CHASSIS, 0x07)
_GET_POWER: Final = (0x2C, 0x02)
_POLICY_OF_BITS: Final[dict[int, PowerRestorePolicy]] = {
    set_policy(policy).data[0]: policy for policy in PowerRestorePolicy if policy is not PowerRestorePolicy.UNKNOWN
}
_BITS_OF_POLICY: Final = {policy: bits for bits, policy in _POLICY_OF_BITS.items()}
_EVERY_POLICY: Final = 0b111
_START_LIMIT_S: Final = 60.0
_TURN_S: Final = 0.05
"""pyghmi's server can miss a wake-up; it looks again after so long."""


class SimBmcError(Exception):
    """The simulated BMC could not be started; the text says why."""


class SimBmc:
    """The parent's side: `async with SimBmc("powerguard", "secret") as bmc: bmc.port`.

    policy: what it holds at first, and what it holds now. heard: names of the commands so far, and each set with its
    value.
    """

    host: Final = "127.0.0.1"
    child: ClassVar[tuple[str, ...]] = ("-m", "powerguard.sim.bmc")

    def __init__(self, user: str, password: str, *, policy: str = PowerRestorePolicy.LAST_STATE, port: int = 0) -> None:
        self.policy = PowerRestorePolicy(policy)
        self.port = port
        self.heard: list[str] = []
        self.first: dict[str, Any] = {"user": user, "password": password}
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        argv = [sys.executable, "-P", *self.child, "--port", str(self.port), "--policy", self.policy]
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=clean_environment()
        )
        try:
            await self.send(self.first)
            async with asyncio.timeout(_START_LIMIT_S):
                await self.take(await self._next_line())
        except (TimeoutError, ValueError, OSError) as error:
            await self.__aexit__(None, None, None)
            msg = f"simulated BMC on {self.host}: did not start ({type(error).__name__}); its own message is above"
            raise SimBmcError(msg) from error
        except asyncio.CancelledError:
            await self.__aexit__(None, None, None)
            raise
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._listening is None:
            await self._process.communicate()
        else:
            await self._listening
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def set_watts(self, watts: int) -> None:
        """Measure this draw from now on (DCMI Get Power Reading)."""
        await self.send({"watts": watts})

    @property
    def running(self) -> asyncio.subprocess.Process:
        """The child process. Raises SimBmcError if there is none."""
        if self._process is None:
            msg = "the simulated BMC is not running: use it in `async with`"
            raise SimBmcError(msg)
        return self._process

    async def send(self, order: dict[str, Any]) -> None:
        """Send the child one line."""
        stdin = self.running.stdin
        if stdin is not None:
            stdin.write(json.dumps(order).encode() + b"\n")
            await stdin.drain()

    async def _next_line(self) -> bytes:
        stdout = self.running.stdout
        return b"" if stdout is None else await stdout.readline()

    async def take(self, line: bytes) -> None:
        """Take what the child reports."""
        news = json.loads(line)
        self.port = int(news.get("port", self.port))
        self.policy = PowerRestorePolicy(news.get("policy", self.policy))
        if "heard" in news:
            self.heard.append(news["heard"])

    async def _listen(self) -> None:
        while line := await self._next_line():
            await self.take(line)


class Chassis:
    """The child's side without the protocol: state, and the answers to the chassis commands."""

    def __init__(self, policy: PowerRestorePolicy) -> None:
        self.policy = policy
        self.watts: int | None = None
        self.cause = self.event = 0x00

    def obey(self, order: dict[str, Any]) -> None:
        """Take a line of the parent's."""
        self.watts = order["watts"]

    def answer(self, command: tuple[int, int], data: bytes) -> tuple[int, bytes] | None:
        """Return completion code and data; None where we do not know the command."""
        if command == _GET_POWER and self.watts is not None:
            report(heard="power")
            now = self.watts.to_bytes(2, "little")
            # DCMI 1.5 table 6-16: now, least, most, average, time stamp, period in ms, state (bit 6: it measures).
            return 0x00, b"\xdc" + 4 * now + bytes(4) + (1000).to_bytes(4, "little") + b"\x40"
        if command not in (_GET_CHASSIS_STATUS, _SET_POLICY, _GET_RESTART_CAUSE):
            return None
        if command == _GET_CHASSIS_STATUS:
            report(heard="status")
            return 0x00, bytes([0x01 | _BITS_OF_POLICY[self.policy] << 5, self.event, 0])
        if command == _GET_RESTART_CAUSE:
            report(heard="cause")
            return 0x00, bytes([self.cause, 0x00])
        return self.set(data)

    def set(self, data: bytes) -> tuple[int, bytes]:
        """Carry out Set Power Restore Policy."""
        if not data:
            return 0xC7, b""
        bits = data[0] & 0x07
        if bits > 3:
            return 0xCC, b""
        policy = _POLICY_OF_BITS.get(bits)
        if policy is not None:
            self.store(policy)
        report(heard="support" if policy is None else f"set {policy}")
        return 0x00, bytes([_EVERY_POLICY])

    def store(self, policy: PowerRestorePolicy) -> None:
        """Hold another policy."""
        self.policy = policy
        report(policy=policy)


def report(**news: str | int) -> None:
    """Inform the parent; a parent that is gone is noticed at stdin."""
    with suppress(BrokenPipeError):
        # One write for a line: print() writes text and newline apart, and two threads report.
        os.write(sys.stdout.fileno(), json.dumps(news).encode() + b"\n")


def make_server(chassis: Chassis, user: str, password: str, port: int) -> Any:  # noqa: ANN401 - pyghmi has no types
    """Return a bound server. pyghmi is imported only here, in the child: the parent may be a daemon."""
    from pyghmi.ipmi.bmc import Bmc  # noqa: PLC0415
    from pyghmi.ipmi.private import serversession  # noqa: PLC0415
    from pyghmi.ipmi.private import session as private  # noqa: PLC0415

    class Session(serversession.ServerSession):  # type: ignore[misc]  # pyghmi has no types
        """Says so when it does not know a user (RAKP status 0Dh), where stock pyghmi falls silent."""

        def _got_rakp1(self, data: Any) -> None:  # noqa: ANN401
            known = self.authdata.get(bytes(data[28:]).decode("utf-8", "replace")) is not None
            if known:
                super()._got_rakp1(data)
                return
            refusal = bytearray([data[0], 0x0D, 0, 0]) + self.clientsessionid
            self.send_payload(refusal, 0x13, retry=False)  # RAKP message 2, IPMI 2.0 table 13-16

    class Server(Bmc):  # type: ignore[misc]  # pyghmi has no types
        def sessionless_data(self, data: Any, sockaddr: Any) -> None:  # noqa: ANN401
            if len(data) >= 48 and data[4] == 6 and data[5] == 0x10:
                self._open(bytes(data[16:]), sockaddr)
            else:
                super().sessionless_data(data, sockaddr)

        def _open(self, request: bytes, sockaddr: Any) -> None:  # noqa: ANN401
            """Take cipher suite 3 only. Any other proposal is refused with RMCP+ status 04h (table 13-15)."""
            if (request[12], request[20], request[28]) == (1, 1, 1):
                Session(self.authdata, self.kg, sockaddr, self.serversocket, request, self.uuid, bmc=self)
                return
            refusal = bytes([request[0], 0x04, 0, 0]) + request[4:8]
            header = b"\x06\x00\xff\x07\x06\x11" + bytes(8) + len(refusal).to_bytes(2, "little")
            private._io_sendto(self.serversocket, header + refusal, sockaddr)  # noqa: SLF001

        def handle_raw_request(self, request: Any, session: Any) -> None:  # noqa: ANN401
            answer = chassis.answer((request["netfn"], request["command"]), bytes(request["data"]))
            if answer is None:
                super().handle_raw_request(request, session)
            else:
                session.send_ipmi_response(code=answer[0], data=list(answer[1]))

    private.myself = "127.0.0.1"  # else pyghmi wakes its own thread over IPv6, which the host may not have
    server = Server({user: password}, port=port, address="127.0.0.1")
    server.port = server.serversocket.getsockname()[1]  # by this number pyghmi finds its sessions again
    return server


def _serve(chassis: Chassis, server: Any) -> NoReturn:  # noqa: ANN401 - pyghmi has no types
    from pyghmi.ipmi.private.session import Session  # noqa: PLC0415

    report(port=server.port, policy=chassis.policy)
    while True:
        Session.wait_for_rsp(timeout=_TURN_S)


def _obey(chassis: Chassis) -> NoReturn:
    """Take orders from stdin, one JSON object a line; its end is our end."""
    for line in sys.stdin:
        chassis.obey(json.loads(line))
    os._exit(0)


def main(
    chassis_of: Callable[[PowerRestorePolicy, dict[str, Any]], Chassis] = lambda policy, _first: Chassis(policy),
    server_of: Callable[[Any, str, str, int], Any] = make_server,
) -> None:
    """`python -m powerguard.sim.bmc`; first line of stdin: {"user": ..., "password": ...}.

    chassis_of: of the policy and that line. server_of: of chassis, user, password and port.
    """
    parser = argparse.ArgumentParser(prog="powerguard.sim.bmc", description="A simulated BMC on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=0, help="UDP port; 0: a free one, printed on stdout")
    parser.add_argument("--policy", default=PowerRestorePolicy.LAST_STATE, help="at first")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal's Ctrl-C reaches us, too: no traceback
    try:
        first = json.loads(sys.stdin.readline())
        user, password = first["user"], first["password"]
        chassis = chassis_of(PowerRestorePolicy(given.policy), first)
    except (ValueError, KeyError, TypeError, OSError) as error:
        sys.exit(f'powerguard.sim.bmc: wants {{"user": ..., "password": ...}} as first line ({type(error).__name__})')
    threading.Thread(target=_obey, args=[chassis], daemon=True).start()
    try:
        _serve(chassis, server_of(chassis, user, password, given.port))
    except (OSError, socket.gaierror) as error:
        sys.exit(f"powerguard.sim.bmc: UDP port {given.port} on 127.0.0.1: {error.strerror}")


if __name__ == "__main__":
    main()
