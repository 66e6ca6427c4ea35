"""What a worker or the root helper has answered for IPMI, as values: both say the same, in hex."""

from collections.abc import Mapping
from typing import Any

from powerguard.effectors.bmc.engine import Ensured, Probe, Watch
from powerguard.effectors.bmc.ipmi import ChassisStatus, decode_restart_cause, decode_support
from powerguard.effectors.bmc.timer import Device, Timer


def status(told: Mapping[str, Any], key: str = "status") -> ChassisStatus:
    """Chassis status of an answer. Raises ReplyError where there is none."""
    return ChassisStatus.decode(_data(told.get(key)) or b"")


def ensured(told: Mapping[str, Any]) -> Ensured:
    """What was set and read back. Raises ReplyError."""
    return Ensured(before=status(told, "before"), after=status(told, "after"), changed=told.get("changed") is True)


def probe(told: Mapping[str, Any]) -> Probe:
    """What is worth knowing. Raises ReplyError where there is no status."""
    support, cause = _data(told.get("support")), _data(told.get("cause"))
    return Probe(
        status=status(told),
        supported=None if support is None else decode_support(support),
        restart_cause=None if cause is None else decode_restart_cause(cause),
    )


def watts(told: Mapping[str, Any]) -> float | None:
    """Watts of an answer, as the worker or the helper has decoded them; None where it has none."""
    power_watts = told.get("power_watts")
    return float(power_watts) if isinstance(power_watts, int | float) and power_watts > 0 else None


def timer(told: Mapping[str, Any]) -> Timer:
    """The watchdog timer of an answer. Raises ReplyError where there is none."""
    return Timer.decode(_data(told.get("timer")) or b"")


def watch(told: Mapping[str, Any]) -> Watch:
    """The watchdog timer and what stands beside it. Raises ReplyError where there is no timer."""
    device, cause = _data(told.get("device")), _data(told.get("cause"))
    return Watch(
        timer=timer(told),
        device=None if device is None else Device.decode(device),
        restart_cause=None if cause is None else decode_restart_cause(cause),
        kernel_driver=told.get("kernel_driver") is True,
    )


def _data(told: object) -> bytes | None:
    """Bytes of an answer's hex field; None when it is absent or no hex."""
    try:
        return bytes.fromhex(told) if isinstance(told, str) else None
    except ValueError:
        return None
