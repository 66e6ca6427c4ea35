"""A simulated BMC that speaks RMCP+, for the demo and for tests: pyghmi's server, completed, in a process of its own.

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
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

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
_USER_LEVEL: Final = 2
_CAUSE_OF_POLICY: Final = {PowerRestorePolicy.ALWAYS_ON: 0x06, PowerRestorePolicy.LAST_STATE: 0x07}
_POWER_BUTTON: Final = 0x03
_AC_FAILED: Final = 0x01
_START_LIMIT_S: Final = 60.0
_TURN_S: Final = 0.05
"""pyghmi's server can miss a wake-up; it looks again after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How the BMC misbehaves.

    refuse: completion code with which every Set Power Restore Policy is refused, such as 0xC1 (IPMI 2.0 table 5-2).
    busy: so many commands are first answered with 0xC0 (node busy).
    lie: a set is acknowledged and not stored. delay_s: every command takes so long. dead: no packet is answered.
    user_level: the account may only log in at level User, and its RAKP message 1 is refused with 0Ah (table 13-15).
    """

    refuse: int | None = None
    busy: int = 0
    lie: bool = False
    delay_s: float = 0.0
    dead: bool = False
    user_level: bool = False


class SimBmcError(Exception):
    """The simulated BMC could not be started; the text says why."""


class SimBmc:
    """The parent's side: `async with SimBmc("powerguard", "secret") as bmc: bmc.port`.

    policy: what it holds at first where the state file holds nothing, and what it holds now.
    state_file: JSON that outlives the BMC, as a real one's memory does; None: forgotten at the end.
    heard: names of the commands so far, and each set with its value.
    """

    host: Final = "127.0.0.1"

    def __init__(
        self,
        user: str,
        password: str,
        *,
        policy: str = PowerRestorePolicy.LAST_STATE,
        state_file: Path | None = None,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        self.policy = PowerRestorePolicy(policy)
        self.port = port
        self.heard: list[str] = []
        self._user = user
        self._password = password
        self._state_file = state_file
        self._faults = faults or Faults()
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()

    @property
    def pid(self) -> int:
        """Of the child process, for tests that stop it in mid-session."""
        return self._running.pid

    async def __aenter__(self) -> Self:
        argv = [sys.executable, "-P", "-m", "powerguard.sim.bmc", "--port", str(self.port), "--policy", self.policy]
        if self._state_file is not None:
            argv += ["--state-file", str(self._state_file)]
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=clean_environment()
        )
        try:
            await self._tell({"user": self._user, "password": self._password, "faults": asdict(self._faults)})
            async with asyncio.timeout(_START_LIMIT_S):
                self._take(await self._next_line())
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

    async def set_faults(self, faults: Faults) -> None:
        """Misbehave otherwise from now on; returns when the BMC has heard it."""
        self._faults = faults
        seen = len(self.heard)
        await self._tell({"faults": asdict(faults)})
        await self.wait_until(lambda: "faults" in self.heard[seen:])

    async def set_watts(self, watts: int) -> None:
        """Measure this draw from now on (DCMI Get Power Reading)."""
        await self._tell({"watts": watts})

    async def wait_until(self, reached: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Wait until `reached` (of `policy` or `heard`) is true. Raises TimeoutError."""
        async with asyncio.timeout(limit_s), self._news:
            await self._news.wait_for(reached)

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            msg = "the simulated BMC is not running: use it in `async with`"
            raise SimBmcError(msg)
        return self._process

    async def _tell(self, order: dict[str, Any]) -> None:
        stdin = self._running.stdin
        if stdin is not None:
            stdin.write(json.dumps(order).encode() + b"\n")
            await stdin.drain()

    async def _next_line(self) -> bytes:
        stdout = self._running.stdout
        return b"" if stdout is None else await stdout.readline()

    def _take(self, line: bytes) -> None:
        news = json.loads(line)
        self.port = int(news.get("port", self.port))
        self.policy = PowerRestorePolicy(news.get("policy", self.policy))
        if "heard" in news:
            self.heard.append(news["heard"])

    async def _listen(self) -> None:
        while line := await self._next_line():
            self._take(line)
            async with self._news:
                self._news.notify_all()


class _Chassis:
    """The child's side without the protocol: state, faults, and the answers to the chassis commands."""

    def __init__(self, policy: PowerRestorePolicy, state_file: Path | None, faults: Faults) -> None:
        self.policy = policy
        self.faults = faults
        self.watts: int | None = None
        self._busy = faults.busy
        self._state_file = state_file
        self._cause = 0x00
        self._event = 0x00
        if state_file is not None and state_file.exists():
            # A BMC that remembers lost its AC, and its host was on: what woke it is the policy it woke with.
            self.policy = PowerRestorePolicy(json.loads(state_file.read_text(encoding="utf-8"))["policy"])
            self._cause = _CAUSE_OF_POLICY.get(self.policy, _POWER_BUTTON)
            self._event = _AC_FAILED

    def misbehave(self, faults: Faults) -> None:
        self.faults = faults
        self._busy = faults.busy
        _report(heard="faults")

    def answer(self, command: tuple[int, int], data: bytes) -> tuple[int, bytes] | None:
        """Return completion code and data; None where we do not know the command."""
        if command == _GET_POWER and self.watts is not None:
            _report(heard="power")
            now = self.watts.to_bytes(2, "little")
            # DCMI 1.5 table 6-16: now, least, most, average, time stamp, period in ms, state (bit 6: it measures).
            return 0x00, b"\xdc" + 4 * now + bytes(4) + (1000).to_bytes(4, "little") + b"\x40"
        if command not in (_GET_CHASSIS_STATUS, _SET_POLICY, _GET_RESTART_CAUSE):
            return None
        if self._busy:
            self._busy -= 1
            _report(heard="busy")
            return 0xC0, b""
        if command == _GET_CHASSIS_STATUS:
            _report(heard="status")
            return 0x00, bytes([0x01 | _BITS_OF_POLICY[self.policy] << 5, self._event, 0])
        if command == _GET_RESTART_CAUSE:
            _report(heard="cause")
            return 0x00, bytes([self._cause, 0x00])
        return self._set(data)

    def _set(self, data: bytes) -> tuple[int, bytes]:
        if not data:
            return 0xC7, b""
        asked = data[0] & 0x07
        if self.faults.refuse is not None:
            _report(heard="set refused")
            return self.faults.refuse, b""
        if asked > 3:
            return 0xCC, b""
        policy = _POLICY_OF_BITS.get(asked)
        if policy is not None and not self.faults.lie:
            self._store(policy)
        _report(heard="support" if policy is None else f"set {policy}")
        return 0x00, bytes([_EVERY_POLICY])

    def _store(self, policy: PowerRestorePolicy) -> None:
        self.policy = policy
        if self._state_file is not None:
            fresh = self._state_file.with_name(self._state_file.name + ".new")
            fresh.write_text(json.dumps({"policy": policy}), encoding="utf-8")
            fresh.replace(self._state_file)
        _report(policy=policy)


def _report(**news: str | int) -> None:
    """Inform the parent; a parent that is gone is noticed at stdin."""
    with suppress(BrokenPipeError):
        # One write for a line: print() writes text and newline apart, and two threads report.
        os.write(sys.stdout.fileno(), json.dumps(news).encode() + b"\n")


def _make_server(chassis: _Chassis, user: str, password: str, port: int) -> Any:  # noqa: ANN401 - pyghmi has no types
    """Return a bound server. pyghmi is imported only here, in the child: the parent may be a daemon."""
    from pyghmi.ipmi.bmc import Bmc  # noqa: PLC0415
    from pyghmi.ipmi.private import serversession  # noqa: PLC0415
    from pyghmi.ipmi.private import session as private  # noqa: PLC0415

    class Session(serversession.ServerSession):  # type: ignore[misc]  # pyghmi has no types
        """Says so when it does not know a user (RAKP status 0Dh), where stock pyghmi falls silent."""

        def _got_rakp1(self, data: Any) -> None:  # noqa: ANN401
            known = self.authdata.get(bytes(data[28:]).decode("utf-8", "replace")) is not None
            too_much = chassis.faults.user_level and data[24] & 0x0F > _USER_LEVEL
            if known and not too_much:
                super()._got_rakp1(data)
                return
            refusal = bytearray([data[0], 0x0A if known else 0x0D, 0, 0]) + self.clientsessionid
            self.send_payload(refusal, 0x13, retry=False)  # RAKP message 2, IPMI 2.0 table 13-16

    class Server(Bmc):  # type: ignore[misc]  # pyghmi has no types
        def sessionless_data(self, data: Any, sockaddr: Any) -> None:  # noqa: ANN401
            if chassis.faults.dead:
                return
            if len(data) >= 48 and data[4] == 6 and data[5] == 0x10:
                self._open(bytes(data[16:]), sockaddr)
            else:
                super().sessionless_data(data, sockaddr)

        def _open(self, asked: bytes, sockaddr: Any) -> None:  # noqa: ANN401
            """Take cipher suite 3 only. Any other proposal is refused with RMCP+ status 04h (table 13-15)."""
            if (asked[12], asked[20], asked[28]) == (1, 1, 1):
                Session(self.authdata, self.kg, sockaddr, self.serversocket, asked, self.uuid, bmc=self)
                return
            refusal = bytes([asked[0], 0x04, 0, 0]) + asked[4:8]
            header = b"\x06\x00\xff\x07\x06\x11" + bytes(8) + len(refusal).to_bytes(2, "little")
            private._io_sendto(self.serversocket, header + refusal, sockaddr)  # noqa: SLF001

        def handle_raw_request(self, request: Any, session: Any) -> None:  # noqa: ANN401
            if chassis.faults.dead:
                return
            answer = chassis.answer((request["netfn"], request["command"]), bytes(request["data"]))
            time.sleep(chassis.faults.delay_s)
            if answer is None:
                super().handle_raw_request(request, session)
            else:
                session.send_ipmi_response(code=answer[0], data=list(answer[1]))

    private.myself = "127.0.0.1"  # else pyghmi wakes its own thread over IPv6, which the host may not have
    server = Server({user: password}, port=port, address="127.0.0.1")
    server.port = server.serversocket.getsockname()[1]  # by this number pyghmi finds its sessions again
    return server


def _serve(chassis: _Chassis, server: Any, port_file: Path | None) -> NoReturn:  # noqa: ANN401 - pyghmi has no types
    from pyghmi.ipmi.private.session import Session  # noqa: PLC0415

    if port_file is not None:
        port_file.write_text(f"{server.port}\n", encoding="ascii")
    _report(port=server.port, policy=chassis.policy)
    while True:
        Session.wait_for_rsp(timeout=_TURN_S)


def _obey(chassis: _Chassis) -> NoReturn:
    """Take new faults or watts from stdin, one JSON object a line; its end is our end."""
    for line in sys.stdin:
        told = json.loads(line)
        if "watts" in told:
            chassis.watts = told["watts"]
        else:
            chassis.misbehave(Faults(**told["faults"]))
    os._exit(0)


def main() -> None:
    """`python -m powerguard.sim.bmc --port-file PATH`; first line of stdin: {"user": ..., "password": ...}."""
    parser = argparse.ArgumentParser(prog="powerguard.sim.bmc", description="A simulated BMC on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=0, help="UDP port; 0: a free one, printed on stdout")
    parser.add_argument("--port-file", type=Path, help="the port is written here")
    parser.add_argument("--state-file", type=Path, help="the policy is kept here")
    parser.add_argument("--policy", default=PowerRestorePolicy.LAST_STATE, help="at first, where no state is kept")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal's Ctrl-C reaches us, too: no traceback
    try:
        first = json.loads(sys.stdin.readline())
        user, password, faults = first["user"], first["password"], Faults(**first.get("faults", {}))
        chassis = _Chassis(PowerRestorePolicy(given.policy), given.state_file, faults)
    except (ValueError, KeyError, TypeError, OSError) as error:
        sys.exit(f'powerguard.sim.bmc: wants {{"user": ..., "password": ...}} as first line ({type(error).__name__})')
    threading.Thread(target=_obey, args=[chassis], daemon=True).start()
    try:
        _serve(chassis, _make_server(chassis, user, password, given.port), given.port_file)
    except (OSError, socket.gaierror) as error:
        sys.exit(f"powerguard.sim.bmc: UDP port {given.port} on 127.0.0.1: {error.strerror}")


if __name__ == "__main__":
    main()
