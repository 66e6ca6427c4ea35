"""The root helper powerguard-ipmi: a closed list of words about the host's own BMC, through /dev/ipmi0.

The device is the whole BMC without a password (it can make users and switch power), so the daemon never has it. Words:

    status; probe (also what can be set); look (a probe that only reads); power (watts)
    ensure    always-on, and no other policy
    restore   the policy that an outage found, but only over always-on: another program set any other policy
    watchdog  read the watchdog timer, who the BMC is, and what powered the host on
    arm       let the BMC cycle the power in in_s seconds: never over another program's timer, never if the kernel
              would stop it again; read back, and disarmed if it does not read back
    disarm    stop that timer, and no other

Below them is a second lock: `ALLOWED`. Only the standard library.

systemd starts it with the first connection to its socket. It answers each connection in a child of its own, so that one
that hangs in the driver does not delay others. It ends after a while without connections: a start for each word would
take too long, and an idle root process should not stay for months.

The kernel's IPMI device, /dev/ipmi0: one command and its answer at a time. Standard library only.

The structures and numbers are those of Linux's <linux/ipmi.h> (driver ipmi_devintf), on a machine with 64-bit longs.
"""

import ctypes
import errno
import fcntl
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from powerguard.clock import boottime_s
from powerguard.effectors.bmc import ipmi
from powerguard.effectors.bmc.ipmi import BmcFailure, Command, Exchange, Failure, Pace, PowerRestorePolicy
from powerguard.effectors.root_helper import EX_USAGE, Answer, RefusedError, by_hand, log_line, serve

DEVICE: Final = "/dev/ipmi0"

ALLOWED: Final = frozenset(
    {
        (0x00, 0x01),  # Get Chassis Status
        (0x00, 0x06),  # Set Power Restore Policy
        (0x00, 0x07),  # Get System Restart Cause
        (0x06, 0x01),  # Get Device ID
        (0x06, 0x22),  # Reset Watchdog Timer
        (0x06, 0x24),  # Set Watchdog Timer
        (0x06, 0x25),  # Get Watchdog Timer
        (0x2C, 0x02),  # DCMI Get Power Reading
    }
)
"""(network function, command) that may pass at all. Chassis Control (00h/02h) is not among them, nor are users."""

_SET_WATCHDOG, _GET_POWER = (0x06, 0x24), (0x2C, 0x02)

_SYSTEM_INTERFACE: Final = 0x0C
_BMC_CHANNEL: Final = 0x0F
_RESPONSE: Final = 1
_ANSWER_BYTES: Final = 272  # IPMI_MAX_MSG_LENGTH
_STALE_ANSWERS: Final = 64


class _Address(ctypes.Structure):
    """struct ipmi_system_interface_addr."""

    _fields_ = (("addr_type", ctypes.c_int), ("channel", ctypes.c_short), ("lun", ctypes.c_ubyte))


class _Message(ctypes.Structure):
    """struct ipmi_msg."""

    _fields_ = (
        ("netfn", ctypes.c_ubyte),
        ("cmd", ctypes.c_ubyte),
        ("data_len", ctypes.c_ushort),
        ("data", ctypes.c_void_p),
    )


class _Request(ctypes.Structure):
    """struct ipmi_req."""

    _fields_ = (("addr", ctypes.c_void_p), ("addr_len", ctypes.c_uint), ("msgid", ctypes.c_long), ("msg", _Message))


class _Received(ctypes.Structure):
    """struct ipmi_recv."""

    _fields_ = (
        ("recv_type", ctypes.c_int),
        ("addr", ctypes.c_void_p),
        ("addr_len", ctypes.c_uint),
        ("msgid", ctypes.c_long),
        ("msg", _Message),
    )


_READ, _READ_WRITE = 2 << 30, 3 << 30
_SEND_COMMAND: Final = _READ | ctypes.sizeof(_Request) << 16 | ord("i") << 8 | 13
_RECEIVE_MSG_TRUNC: Final = _READ_WRITE | ctypes.sizeof(_Received) << 16 | ord("i") << 8 | 11


class IpmiDevice:
    """`with IpmiDevice(path, by_s) as device: device.send(command)`. by_s: a moment of CLOCK_BOOTTIME for all of it."""

    def __init__(self, path: str, by_s: float) -> None:
        self._path = path
        self._by_s = by_s
        self._descriptor = -1
        self._asked = 0

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot(self._path, error) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def send(self, command: Command) -> tuple[int, bytes]:
        """Send one command and return completion code and data. Raises BmcFailure."""
        if not _may_pass(command):
            text = f"{command.name} ({command.netfn:02X}h/{command.number:02X}h) is not a permitted command"
            raise BmcFailure(Failure.PRIVILEGE, text)
        self._asked += 1
        data = ctypes.create_string_buffer(command.data, max(len(command.data), 1))
        address = _Address(_SYSTEM_INTERFACE, _BMC_CHANNEL, 0)
        message = _Message(command.netfn, command.number, len(command.data), ctypes.addressof(data))
        request = _Request(ctypes.addressof(address), ctypes.sizeof(address), self._asked, message)
        try:
            self._call(_SEND_COMMAND, request)
        except OSError as error:
            raise _cannot(self._path, error) from None
        for _ in range(_STALE_ANSWERS):
            answer = self._receive(command)
            if answer is not None:
                return answer
        text = f"{self._path}: {_STALE_ANSWERS} answers, and none of them to {command.name}"
        raise BmcFailure(Failure.PROTOCOL, text)

    def _receive(self, command: Command) -> tuple[int, bytes] | None:
        """Take the next message; None where it answers something else (an event, what an earlier time-out left)."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        left_s = max(self._by_s - boottime_s(), 0.0)
        if not poll.poll(left_s * 1000):
            raise BmcFailure(Failure.TIMEOUT, f"{self._path}: the BMC does not answer {command.name}")
        data, address = ctypes.create_string_buffer(_ANSWER_BYTES), ctypes.create_string_buffer(40)
        message = _Message(0, 0, _ANSWER_BYTES, ctypes.addressof(data))
        received = _Received(0, ctypes.addressof(address), ctypes.sizeof(address), 0, message)
        try:
            self._call(_RECEIVE_MSG_TRUNC, received)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EINTR}:
                return None
            if error.errno != errno.EMSGSIZE:  # a message that is too long is cut, and is still an answer
                raise _cannot(self._path, error) from None
        reply = received.msg
        same = (received.msgid, reply.netfn, reply.cmd) == (self._asked, command.netfn | 1, command.number)
        if received.recv_type != _RESPONSE or not same:
            return None
        answer = data.raw[: min(reply.data_len, _ANSWER_BYTES)]
        if not answer:
            raise BmcFailure(Failure.PROTOCOL, f"{self._path}: {command.name} was answered without a completion code")
        return answer[0], answer[1:]

    def _call(self, number: int, argument: Any) -> None:  # noqa: ANN401 - any of the structures above
        fcntl.ioctl(self._descriptor, number, argument, True)


def _may_pass(command: Command) -> bool:
    """Whether it is on the list; of the watchdog: use SMS/OS, action none or power cycle, no interrupt before it."""
    pair, data = (command.netfn, command.number), command.data
    if pair == _SET_WATCHDOG:
        return len(data) == 6 and data[0] in (0x04, 0x44) and data[1] in (0x00, 0x03) and data[2] == 0
    return pair in ALLOWED and (pair != _GET_POWER or data[:1] == b"\xdc")


def _cannot(path: str, error: OSError) -> BmcFailure:
    """A fault of the device, and the fix."""
    from pathlib import Path  # noqa: PLC0415 - 4 ms of a word's 30, loaded only if needed

    match error.errno:
        case errno.ENOENT | errno.ENXIO | errno.ENODEV:
            has_driver = Path("/sys/module/ipmi_si").exists() or Path("/sys/module/ipmi_ssif").exists()
            right = (
                "its driver found no BMC (dmesg | grep -i ipmi): there is none, or it is disabled in the firmware setup"
                if has_driver and Path("/sys/module/ipmi_devintf").exists()
                else "modprobe -a ipmi_si ipmi_devintf (cloud kernels have neither: install the usual one)"
            )
            return BmcFailure(Failure.UNREACHABLE, f"{path}: not there: {right}")
        case errno.EACCES | errno.EPERM:
            return BmcFailure(Failure.PRIVILEGE, f"{path}: not permitted to user {os.geteuid()}: it is root's alone")
        case errno.EBUSY | errno.EAGAIN:
            return BmcFailure(Failure.BUSY, f"{path}: busy: another program holds it (fuser -v {path})")
        case errno.ENOTTY | errno.EINVAL:
            return BmcFailure(Failure.PROTOCOL, f"{path}: is not an IPMI device")
        case _:
            return BmcFailure(Failure.PROTOCOL, f"{path}: {error.strerror}")


WORDS: Final = ("status", "ensure", "probe", "look", "power", "restore", "watchdog", "arm", "disarm")
_TAKES: Final = {"restore": "policy", "arm": "in_s"}
_RESTORED: Final = (PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE)
_MAX_S: Final = 6553
"""Seconds that a watchdog timer of the BMC can hold."""
_OF_TIMER: Final = ("watchdog", "arm", "disarm")
MODULES: Final = "/sys/module"
IDLE_S: Final = 600.0
"""Longer than from the first check of an outage to most commits."""
_CHILD_S: Final = 30
_LISTEN_FD: Final = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""
WITHIN_S: Final = 5.0
"""Timeout for one request, and the longest that a caller may ask for."""


class IpmiRequest(NamedTuple):
    """One request. value: of `restore` a policy, of `arm` whole seconds, else None."""

    name: str
    within_s: float = WITHIN_S
    value: str | int | None = None


def carry_out(path: str, word: IpmiRequest, modules: str = MODULES) -> Answer:
    """Do what is asked. `ok`: the word was one of ours; `failure`: why the BMC did not do it, null where it did."""
    answer: dict[str, Any] = {"schema_version": 1, "word": word.name, "ok": True, "failure": None, "text": ""}
    by_s = boottime_s() + word.within_s
    try:
        _refuse_under_test(path)
        with IpmiDevice(path, by_s) as device:
            exchange = Exchange(device.send, Pace(clock=boottime_s, sleep=time.sleep, by_s=by_s))
            result = _ask(exchange, word) if word.name not in _OF_TIMER else _ask_timer(exchange, word, modules)
    except BmcFailure as failed:
        log_line(4, f"{word.name}: {failed}")
        return answer | {"failure": failed.failure, "text": str(failed)}
    if result.get("changed"):
        log_line(5, _done(word, result))
    return answer | {key: value.hex() if isinstance(value, bytes) else value for key, value in result.items()}


def _done(word: IpmiRequest, result: Mapping[str, Any]) -> str:
    """The change that was made, for the log."""
    match word.name:
        case "arm":
            return f"watchdog armed: power cycle in {word.value} s (reads {result['timer'].hex()})"
        case "disarm":
            return "watchdog stopped"
        case _:
            return f"power restore policy set to {word.value or 'always-on'} (status was {result['before'].hex()})"


def _ask(exchange: Exchange, word: IpmiRequest) -> dict[str, Any]:
    match word.name:
        case "status":
            return {"status": exchange.status()}
        case "ensure":
            return exchange.ensure(PowerRestorePolicy.ALWAYS_ON)._asdict()
        case "restore":
            return exchange.ensure(PowerRestorePolicy(str(word.value)), PowerRestorePolicy.ALWAYS_ON)._asdict()
        case "power":
            return {"power_watts": exchange.power_watts()}
        case _:
            return exchange.probe(ask_support=word.name == "probe")._asdict()


def _ask_timer(exchange: Exchange, word: IpmiRequest, modules: str) -> dict[str, Any]:
    kernel_driver = os.path.isdir(f"{modules}/ipmi_watchdog")  # noqa: PTH112 - pathlib takes 4 ms
    match word.name:
        case "arm":
            if kernel_driver:
                raise BmcFailure(
                    Failure.HELD, "the kernel's ipmi_watchdog is loaded, and stops the timer at every power-off"
                )
            return {"timer": ipmi.arm(exchange, int(word.value or 0)), "changed": True}
        case "disarm":
            timer, changed = ipmi.disarm(exchange)
            return {"timer": timer, "changed": changed}
        case _:
            return {**ipmi.look(exchange)._asdict(), "kernel_driver": kernel_driver}


def checked(fields: Mapping[str, object]) -> IpmiRequest:
    """Return the word, if it is one. Raises RefusedError."""
    word, within_s = fields.get("word"), fields.get("within_s", WITHIN_S)
    if word not in WORDS or not isinstance(word, str):
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    takes = _TAKES.get(word)
    if set(fields) - {"word", "within_s", takes}:
        msg = f"{word} takes {f'{takes}, ' if takes else ''}within_s and no other key"
        raise RefusedError(msg)
    if isinstance(within_s, bool) or not isinstance(within_s, int | float) or not 0 < within_s <= WITHIN_S:
        msg = f"within_s must be a number above 0, at most {WITHIN_S:g}"
        raise RefusedError(msg)
    value = None if takes is None else fields.get(takes)
    if takes == "policy" and value not in _RESTORED:
        msg = f"policy must be {' or '.join(_RESTORED)}, as an outage found it"
        raise RefusedError(msg)
    if takes == "in_s" and (type(value) is not int or not 1 <= value <= _MAX_S):
        msg = f"in_s must be a whole number of 1 to {_MAX_S}"
        raise RefusedError(msg)
    return IpmiRequest(word, float(within_s), value if isinstance(value, str | int) else None)


def _refuse_under_test(path: str) -> None:
    if os.environ.get("POWERGUARD_UNDER_TEST") and path == DEVICE:
        raise BmcFailure(Failure.PRIVILEGE, "refused under test: it is this machine's own BMC; give --device")


def listen(server: int, answer: Callable[[Mapping[str, object]], Answer], idle_s: float = IDLE_S) -> int:
    """Answer each connection to a listening socket in a child, until there was none for idle_s."""
    import signal  # noqa: PLC0415 - a word by hand needs neither
    import socket  # noqa: PLC0415 - likewise

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    with socket.socket(fileno=server) as listening:
        listening.setblocking(False)
        while select.select([listening], [], [], idle_s)[0]:
            try:
                connection, _ = listening.accept()
            except OSError:  # gone again
                continue
            with connection:
                try:
                    child = os.fork()
                except OSError as error:  # the caller gets no answer, and reports it
                    log_line(4, f"cannot start a process for another word: {error.strerror}")
                    continue
                if child == 0:
                    os.dup2(connection.fileno(), 0)
                    os.dup2(connection.fileno(), 1)
                    break
        else:
            return 0
    signal.alarm(_CHILD_S)
    return serve(answer, awaited=("restore",))


def _serve(answer: Callable[[Mapping[str, object]], Answer]) -> int:
    """Answer on the socket that systemd hands over; without one, the one line of standard input."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return listen(_LISTEN_FD, answer)
    return serve(answer, awaited=("restore",))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one word of the command line and return the exit status: 0 done, 1 not done, 64 usage."""
    if arguments == ["serve"]:
        return _serve(lambda fields: carry_out(DEVICE, checked(fields)))
    import argparse  # noqa: PLC0415 - 9 ms, not needed when the socket starts it

    parser = argparse.ArgumentParser(prog="powerguard-ipmi", description="This host's own BMC, as root.")
    parser.add_argument("word", choices=[*WORDS, "serve"])
    parser.add_argument("--device", default=DEVICE, help="the kernel's IPMI device (%(default)s)")
    parser.add_argument("--within-s", default=WITHIN_S, type=float, help="how long the BMC may take (%(default)s)")
    parser.add_argument("--policy", help="for restore: what was there before the outage")
    parser.add_argument("--in-s", type=int, help="for arm: when the BMC cycles the power, in seconds")
    parser.add_argument("--modules", default=MODULES, help="where the kernel lists its modules (%(default)s)")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    if args.word == "serve":
        return _serve(lambda fields: carry_out(args.device, checked(fields), args.modules))
    given = {"policy": args.policy, "in_s": args.in_s}
    fields = {"word": args.word, "within_s": args.within_s, **{key: it for key, it in given.items() if it is not None}}
    return by_hand("powerguard-ipmi", lambda: carry_out(args.device, checked(fields), args.modules))


def main() -> None:
    """Run, and end with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
