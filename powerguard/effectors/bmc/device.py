"""The kernel's IPMI device, /dev/ipmi0: one command and its answer at a time. Standard library only.

The structures and numbers are those of Linux's <linux/ipmi.h> (driver ipmi_devintf), on a machine with 64-bit longs.
"""

import ctypes
import errno
import fcntl
import os
import select
from typing import Any, Final, Self

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.exchange import BmcFailure
from powerguard.effectors.bmc.ipmi import Command, Failure

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
            text = f"{command.name} ({command.netfn:02X}h/{command.number:02X}h) is not among what may be asked"
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
        told = _Received(0, ctypes.addressof(address), ctypes.sizeof(address), 0, message)
        try:
            self._call(_RECEIVE_MSG_TRUNC, told)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EINTR}:
                return None
            if error.errno != errno.EMSGSIZE:  # what is longer than any answer is cut, and is still an answer
                raise _cannot(self._path, error) from None
        its = told.msg
        same = (told.msgid, its.netfn, its.cmd) == (self._asked, command.netfn | 1, command.number)
        if told.recv_type != _RESPONSE or not same:
            return None
        answer = data.raw[: min(its.data_len, _ANSWER_BYTES)]
        if not answer:
            raise BmcFailure(Failure.PROTOCOL, f"{self._path}: {command.name} was answered without a completion code")
        return answer[0], answer[1:]

    def _call(self, number: int, told: Any) -> None:  # noqa: ANN401 - any of the structures above
        fcntl.ioctl(self._descriptor, number, told, True)


def _may_pass(command: Command) -> bool:
    """Whether it is on the list; of the watchdog: use SMS/OS, action none or power cycle, no interrupt before it."""
    pair, data = (command.netfn, command.number), command.data
    if pair == _SET_WATCHDOG:
        return len(data) == 6 and data[0] in (0x04, 0x44) and data[1] in (0x00, 0x03) and data[2] == 0
    return pair in ALLOWED and (pair != _GET_POWER or data[:1] == b"\xdc")


def _cannot(path: str, error: OSError) -> BmcFailure:
    """What is wrong with the device, and what would be right."""
    from pathlib import Path  # noqa: PLC0415 - 4 ms of a word's 30, for who needs it alone

    match error.errno:
        case errno.ENOENT | errno.ENXIO | errno.ENODEV:
            has_driver = Path("/sys/module/ipmi_si").exists() or Path("/sys/module/ipmi_ssif").exists()
            right = (
                "its driver found no BMC (dmesg | grep -i ipmi): none, or the firmware setup has switched it off"
                if has_driver and Path("/sys/module/ipmi_devintf").exists()
                else "modprobe ipmi_si ipmi_devintf (cloud kernels have neither: install the usual one)"
            )
            return BmcFailure(Failure.UNREACHABLE, f"{path}: not there: {right}")
        case errno.EACCES | errno.EPERM:
            return BmcFailure(Failure.PRIVILEGE, f"{path}: not permitted to user {os.geteuid()}: it is root's alone")
        case errno.EBUSY | errno.EAGAIN:
            return BmcFailure(Failure.BUSY, f"{path}: busy: another program holds it (fuser -v {path})")
        case errno.ENOTTY | errno.EINVAL:
            return BmcFailure(Failure.PROTOCOL, f"{path}: is no IPMI device")
        case _:
            return BmcFailure(Failure.PROTOCOL, f"{path}: {error.strerror}")
