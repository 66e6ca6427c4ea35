"""systemd's readiness protocol, sd_notify(3): what a service tells its manager, as bytes, and what it is told."""

from collections.abc import Mapping
from dataclasses import dataclass

STATUS_CHARS = 200
"""`systemctl status` shows one line."""


def encode(fields: Mapping[str, str]) -> bytes:
    """Return one datagram of NAME=value lines; a newline in a value would begin a field and becomes a space."""
    return "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items()).encode(
        "utf-8", "backslashreplace"
    )


def ready(status: str = "") -> bytes:
    """Say that the service is up."""
    return encode({"READY": "1", "STATUS": status[:STATUS_CHARS]} if status else {"READY": "1"})


def status(text: str) -> bytes:
    """Say one line for `systemctl status`."""
    return encode({"STATUS": text[:STATUS_CHARS]})


def watchdog() -> bytes:
    """Say that the service still makes progress."""
    return encode({"WATCHDOG": "1"})


def reloading(monotonic_us: int) -> bytes:
    """Say that the settings are read anew; `ready` ends it. Without the time systemd >= 253 may fail the reload."""
    return encode({"RELOADING": "1", "MONOTONIC_USEC": str(monotonic_us)})


def stopping(status: str = "") -> bytes:
    """Say that the service is going down."""
    return encode({"STOPPING": "1", "STATUS": status[:STATUS_CHARS]} if status else {"STOPPING": "1"})


def extend_timeout(seconds: float) -> bytes:
    """Ask for that many seconds more before start or stop counts as hung."""
    return encode({"EXTEND_TIMEOUT_USEC": str(max(0, round(seconds * 1e6)))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """What the environment tells of the service manager.

    address: of its socket, as `socket.sendto` takes it; None where there is none or its kind is unknown.
    watchdog_s: the service is killed when it is silent for so long; None when nobody watches.
    """

    address: str | bytes | None = None
    watchdog_s: float | None = None


def parse(environ: Mapping[str, str], pid: int) -> Manager:
    """Read NOTIFY_SOCKET (a path, or @name in the abstract namespace), WATCHDOG_USEC and WATCHDOG_PID."""
    told = environ.get("NOTIFY_SOCKET", "")
    address: str | bytes | None = None
    if told.startswith("@") and len(told) > 1:
        address = b"\0" + told[1:].encode("utf-8", "surrogateescape")
    elif told.startswith("/"):
        address = told
    return Manager(address=address, watchdog_s=_watchdog_s(environ, pid))


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for another process of this service
    told = environ.get("WATCHDOG_USEC", "")
    if not (told.isascii() and told.isdigit() and len(told) < 20) or int(told) == 0:
        return None
    return int(told) / 1e6
