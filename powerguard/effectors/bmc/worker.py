"""One IPMI operation in a process of its own: `python -m powerguard.effectors.bmc.worker`, JSON in, JSON out.

pyghmi 1.6.19 cannot be bounded inside a long-lived process: a BMC that dies in mid-session holds it for 28 s, and after
one failed login with str credentials that BMC is out of reach for the life of the process (docs/decisions/0010).
So each operation gets a process that ends itself at its deadline and is killed by the daemon if it does not.

stdin: {"operation", "host", "port", "user", "password", "by_s"}; user and password are base64 of bytes and
exist nowhere else, by_s is a moment of CLOCK_BOOTTIME. operation: "status"; "ensure";
"restore" ("policy", over always-on alone); "probe"; "look" (a probe that sends only reads); "power" (watts);
"power-on" (the sentinel's); "account" (how much ours may do).
stdout: one object, {"ok": true, ...} or {"ok": false, "failure", "text"}.
"""

import base64
import hashlib
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.ipmi import (
    OPERATOR,
    POWER_ON,
    BmcFailure,
    Command,
    Exchange,
    Failure,
    Pace,
    PowerRestorePolicy,
    Session,
    refusal,
    silence,
)

_LOGIN = "login"
# ASF presence ping (IPMI 2.0 section 13.2.3). Only used to learn at once that the port is closed.
_PING = b"\x06\x00\xff\x06\x00\x00\x11\xbe\x80\x00\x00\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """One operation. The secrets stay out of every repr."""

    operation: str
    host: str
    port: int
    by_s: float
    user: bytes = field(repr=False)
    password: bytes = field(repr=False)
    policy: str = ""

    @classmethod
    def read(cls, text: bytes) -> "WorkerRequest":
        """Decode a request. Raises ValueError, KeyError or TypeError."""
        fields = json.loads(text)
        return cls(
            operation=str(fields["operation"]),
            host=str(fields["host"]),
            port=int(fields["port"]),
            by_s=float(fields["by_s"]),
            user=base64.b64decode(fields["user"]),
            password=base64.b64decode(fields["password"]),
            policy=str(fields.get("policy", "")),
        )


_TEXTS: Final = (
    ("incorrect password", Failure.AUTH),
    ("unauthorized name", Failure.AUTH),
    ("invalid integrity check value", Failure.AUTH),
    ("rakp4 integrity code", Failure.AUTH),
    ("unauthorized role", Failure.PRIVILEGE),
    ("invalid role", Failure.PRIVILEGE),
    ("privilege", Failure.PRIVILEGE),
    ("privelege", Failure.PRIVILEGE),
    ("insufficient resources", Failure.BUSY),
    ("session no longer connected", Failure.UNREACHABLE),
    ("timeout", Failure.UNREACHABLE),
)
"""Texts of pyghmi.ipmi.private (IPMI 2.0 table 13-15) that show how a login failed, in lower case."""


_SHA1: Final = bytes((0, 0, 0, 8, 1))
"""The authentication payload for RAKP-HMAC-SHA1, as in cipher suite 3 (IPMI 2.0 table 13-18)."""


def _heeding_the_answer(opened: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Return pyghmi's handler of the open-session answer, made to take the algorithms that the BMC names.

    pyghmi 1.6.19 goes on with the cipher suite that it asked for. The login at a BMC that answers a proposal of suite
    17 with suite 3, such as pyghmi's own server, then fails with "pack expected 32 items".
    """

    def taken(session: Any, data: Any) -> object:  # noqa: ANN401 - pyghmi has no types
        if data[1] == 0 and bytes(data[12:17]) == _SHA1:
            session.attemptedhash, session.currhashlib, session.currhashlen = 1, hashlib.sha1, 12
        return opened(session, data)

    return taken


def log_in(host: str, port: int, user: bytes, password: bytes) -> Session:
    """Log in as Operator through pyghmi. Raises BmcFailure, and whatever pyghmi lets escape."""
    # Imported here: it takes 0.2 s, and the deadline is watched by now.
    from pyghmi.exceptions import IpmiException  # noqa: PLC0415
    from pyghmi.ipmi.command import Command as Connection  # noqa: PLC0415
    from pyghmi.ipmi.private.session import Session as PyghmiSession  # noqa: PLC0415

    PyghmiSession._got_rmcp_response = _heeding_the_answer(PyghmiSession._got_rmcp_response)  # noqa: SLF001
    try:
        # Bytes, never str: with str a session leaks and blocks the next one.
        connection = Connection(bmc=host, userid=user, password=password, port=port, privlevel=OPERATOR)
    except IpmiException as error:
        raise _failure(str(error)) from None

    def send(command: Command) -> tuple[int, bytes]:
        try:
            reply = connection.raw_command(netfn=command.netfn, command=command.number, data=list(command.data))
        except IpmiException:
            raise silence(command) from None
        if reply is None or reply.get("error") == "timeout":
            raise silence(command)
        return int(reply["code"]), bytes(reply["data"])

    return Session(send, connection.ipmi_session.logout)


def _failure(text: str) -> BmcFailure:
    """Classify what pyghmi raises from a login. It has no text if there was no answer."""
    if text in ("", "None"):
        return BmcFailure(Failure.UNREACHABLE, "no answer to the login")
    for part, failure in _TEXTS:
        if part in text.lower():
            return BmcFailure(failure, text)
    return BmcFailure(Failure.PROTOCOL, text)


class Worker:
    """The process: main thread in pyghmi, one watching the deadline, one listening for "port closed"."""

    def __init__(self, stdout: int) -> None:
        self._stdout = stdout
        self._answering = threading.Lock()
        self._answered = False
        self._doing = "start"
        self._in_session = False
        self._busy: BmcFailure | None = None

    def answer(self, answer: dict[str, Any]) -> None:
        """Write the one answer; the first thread to have one wins."""
        with self._answering:
            if not self._answered:
                self._answered = True
                os.write(self._stdout, json.dumps(answer).encode())

    def end(self, answer: dict[str, Any]) -> NoReturn:
        """Answer and leave without joining the library's threads."""
        try:
            self.answer(answer)
        finally:
            os._exit(0)

    def fail(self, failure: Failure, text: str) -> NoReturn:
        self.end({"ok": False, "failure": failure, "text": text})

    def watch_deadline(self, by_s: float) -> None:
        """Say what was being waited for, before the daemon has to kill us."""
        while (left_s := by_s - boottime_s()) > 0:
            time.sleep(left_s)
        if self._busy is not None:
            # It answers, and always "busy": the question that is open now may just have been lost on its way.
            self.fail(self._busy.failure, str(self._busy))
        if self._in_session:
            self.fail(Failure.TIMEOUT, f"answered the login, then fell silent during {self._doing}")
        if self._doing == _LOGIN:
            self.fail(Failure.UNREACHABLE, "no answer to the login")
        self.fail(
            Failure.PROTOCOL, "the IPMI library did not start in time: this host is overloaded, or its disk hangs"
        )

    def watch_port(self, request: WorkerRequest) -> None:
        """Listen for ICMP "port unreachable", which pyghmi's unconnected socket never hears."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(request.host, request.port, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                probe.send(_PING)
                probe.recv(64)
        except ConnectionRefusedError:
            if not self._in_session:
                self.fail(Failure.UNREACHABLE, "that UDP port is closed")
        except (OSError, UnicodeError):
            return  # no route, no name: the login meets that too, and reports it

    def run(self, request: WorkerRequest) -> NoReturn:
        """Carry the operation out within its deadline."""
        threading.Thread(target=self.watch_deadline, args=[request.by_s], daemon=True).start()
        threading.Thread(target=self.watch_port, args=[request], daemon=True).start()
        session = self._log_in(request)

        def send(command: Command) -> tuple[int, bytes]:
            self._doing = command.name
            code, data = session.send(command)
            refused = refusal(command, code)
            self._busy = refused if refused is not None and refused.failure is Failure.BUSY else None
            return code, data

        exchange = Exchange(send, Pace(clock=boottime_s, sleep=time.sleep, by_s=request.by_s))
        if request.operation == "ensure":
            answer = exchange.ensure(PowerRestorePolicy.ALWAYS_ON)._asdict()
        elif request.operation == "restore":
            answer = exchange.ensure(PowerRestorePolicy(request.policy), PowerRestorePolicy.ALWAYS_ON)._asdict()
        elif request.operation == "status":
            answer = {"status": exchange.status()}
        elif request.operation in ("probe", "look"):
            answer = exchange.probe(ask_support=request.operation == "probe")._asdict()
        elif request.operation == "power":
            answer = {"power_watts": exchange.power_watts()}
        elif request.operation == "power-on":
            exchange.ask(POWER_ON)
            answer = {}
        elif request.operation == "account":
            answer = {"level": exchange.account_level(request.user)}
        else:
            self.fail(Failure.PROTOCOL, f"unknown operation {request.operation!r}")
        encoded = {key: value.hex() if isinstance(value, bytes) else value for key, value in answer.items()}
        self.answer({"ok": True} | encoded)
        session.close()  # frees the BMC's session slot; the answer is out, whatever comes of it
        os._exit(0)

    def _log_in(self, request: WorkerRequest) -> Session:
        self._doing = _LOGIN
        session = log_in(request.host, request.port, request.user, request.password)
        self._in_session = True
        return session


def main() -> NoReturn:
    """Read one request, carry it out, write one answer. Always ends with status 0 and an answer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the password
    worker = Worker(os.dup(1))
    os.dup2(2, 1)  # libraries print complaints; stdout belongs to the answer
    try:
        request = WorkerRequest.read(sys.stdin.buffer.read())
    except (ValueError, KeyError, TypeError) as error:
        worker.fail(Failure.PROTOCOL, f"request not understood ({type(error).__name__})")
    try:
        worker.run(request)
    except BmcFailure as failed:
        worker.fail(failed.failure, str(failed))
    except socket.gaierror as error:
        worker.fail(Failure.UNREACHABLE, f"the name does not resolve ({error.strerror})")
    except Exception as error:  # noqa: BLE001 - pyghmi lets struct.error, TypeError and others escape (measured)
        text = f"{type(error).__name__}: {error}"
        for secret in (request.password, base64.b64encode(request.password)):
            text = text.replace(secret.decode("utf-8", "replace"), "(password)")
        worker.fail(Failure.PROTOCOL, text)


if __name__ == "__main__":
    main()
