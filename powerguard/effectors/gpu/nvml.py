"""NVML: reads GPUs and sets their power limits; each wait is limited.

A wedged driver hangs in the kernel and cannot be interrupted. So every call is made in a thread of its
own, one for each GPU, and a GPU that does not answer in time is reported as such; the others still count.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from powerguard.clock import boottime_s

MOST_GPUS: Final = 64
"""Largest plausible number of GPUs in one host."""

SAME_MW: Final = 1000
"""Limits that differ by less are equal: a driver may round the order."""

Key = TypeVar("Key")
Value = TypeVar("Value")

_WORDS: Final[Mapping[int, str]] = {
    3: "this GPU has no power limit that can be set (many laptop and virtual GPUs have none)",
    4: "not permitted: it needs root and CAP_SYS_ADMIN, and on the host, not in a container or a virtual machine",
    9: "the NVIDIA driver is not loaded: modprobe nvidia, or reinstall it for this kernel",
    12: "the NVML library libnvidia-ml.so.1 is not there: install the one of the driver (Debian: libnvidia-ml1)",
    13: "the NVML library is too old for this: update the NVIDIA driver",
    15: "the GPU has fallen off the bus: it needs a reset or a reboot",
    16: "the GPU needs a reset: nvidia-smi --gpu-reset, or a reboot",
    18: "library and kernel module of the NVIDIA driver differ, as after an update: reboot",
    28: "the GPU is gone",
}
"""Texts by nvmlReturn_t of nvml.h; for a missing number, NVML's own text is used."""

_LOST: Final = frozenset({15, 16, 28})

_THROTTLED: Final[Mapping[int, str]] = {
    0x8: "hardware_slowdown",
    0x20: "temperature",
    0x40: "hardware_temperature",
    0x80: "power_brake",
}
"""nvmlClocksThrottleReasons of nvml.h that slow a busy GPU down against its will. The power limit (0x4) is none: a GPU
under full load always runs into it (an H100 at 690 of 700 W)."""
_POWER_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT: milliwatts at this moment."""
_UNCORRECTED, _SINCE_LOADED = 1, 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC."""


class NvmlError(Exception):
    """NVML refuses, fails or hangs: what, and the fix. lost: the GPU is gone."""

    def __init__(self, text: str, *, lost: bool = False, hangs: bool = False) -> None:
        super().__init__(text)
        self.lost = lost
        self.hangs = hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML reports it. Limits are milliwatts, NVML's own unit.

    power_w: what it draws at this moment; if the board does not report that, NVML's usual value, which can be a mean
    of the last second. utilization_pct: share of the last second in which it computed; persistent: the driver stays
    loaded without a user of the GPU, and keeps the limits. None if not reported (MIG has no utilization).
    throttled: why it is slower than it could be, right now.
    """

    index: int
    uuid: str
    name: str
    limit_mw: int
    default_mw: int | None
    min_mw: int
    max_mw: int
    power_w: float | None
    utilization_pct: int | None
    throttled: tuple[str, ...]
    mig: bool
    persistent: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU as the check after a power-off sees it: its identity, and whether it needs a reset.

    pending: row_remap, page_retirement: memory went bad, and only a reset or a reboot replaces it. worn: a row could
    not be replaced, so the GPU should be exchanged; None if not reported. memory_errors: uncorrected ones since the
    driver was loaded; None where ECC is off or missing. Xid errors cannot be polled: NVML sends them only to listeners.
    """

    uuid: str
    name: str
    pending: tuple[str, ...]
    worn: bool | None
    memory_errors: int | None


def bounded(jobs: Mapping[Key, Callable[[], Value]], by_s: float) -> dict[Key, Value | NvmlError]:
    """Do jobs side by side, and wait for their answers until by_s (CLOCK_BOOTTIME); threads that hang are left."""
    answers: queue.SimpleQueue[tuple[Key, Value | NvmlError]] = queue.SimpleQueue()
    began_s = boottime_s()

    def run(key: Key, job: Callable[[], Value]) -> None:
        try:
            answers.put((key, job()))
        except NvmlError as error:
            answers.put((key, error))
        except BaseException as error:
            answers.put((key, NvmlError(f"powerguard-gpu broke ({type(error).__name__}): see its log")))
            raise

    for key, job in jobs.items():
        threading.Thread(target=run, args=(key, job), daemon=True).start()
    results: dict[Key, Value | NvmlError] = {}
    while len(results) < len(jobs):
        try:
            key, answer = answers.get(timeout=max(by_s - boottime_s(), 0.0))
        except queue.Empty:
            break
        results[key] = answer
    hung = f"no answer within {max(by_s - began_s, 0.0):.1f} s: the NVIDIA driver hangs (dmesg says why: look for Xid)"
    return {key: results.get(key, NvmlError(hung, hangs=True)) for key in jobs}


def may_set_limits() -> bool:
    """Say whether this process has CAP_SYS_ADMIN, which the driver asks for, and not for root."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & 1 << 21)


class Nvml:
    """NVML, loaded and initialised. Its methods may hang: call them through `bounded`."""

    def __init__(self, library: Any, count: int) -> None:  # noqa: ANN401 - the module ships no types
        self._library = library
        self._handles: dict[int, Any] = {}
        self.count = count

    @classmethod
    def open(cls, by_s: float) -> Self:
        """Load and initialise it by by_s. Raises NvmlError."""
        answer = bounded({"init": cls._open}, by_s)["init"]
        if isinstance(answer, NvmlError):
            raise answer
        return answer

    @classmethod
    def _open(cls) -> Self:
        try:
            # Not at the top: a word that is refused, and one that only holds, need no NVML and are quicker without.
            library = import_module("pynvml")
        except ImportError as error:
            msg = f"nvidia-ml-py is missing in powerguard's environment ({error}): pip install '.[gpu]' in a checkout"
            raise NvmlError(msg) from None
        made = cls(library, 0)
        made._call("nvmlInit")
        made.count = int(made._call("nvmlDeviceGetCount"))
        if made.count > MOST_GPUS:
            msg = f"NVML reports {made.count} GPUs, but at most {MOST_GPUS} are plausible"
            raise NvmlError(msg)
        return made

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - likewise
        try:
            return getattr(self._library, name)(*arguments)
        except self._library.NVMLError as error:
            code = int(error.value)
            text = _WORDS.get(code, f"{name}: {error} ({code}): look for Xid in dmesg; reset the GPU, or reboot")
            raise NvmlError(text, lost=code in _LOST) from None

    def _ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - likewise
        """Ask for an optional value; None if the GPU does not report it."""
        try:
            return self._call(name, *arguments)
        except NvmlError as error:
            if error.lost:
                raise
            return None

    def look(self, by_s: float) -> dict[int, Gpu | NvmlError]:
        """Look at every GPU, by index."""
        return bounded({index: partial(self._look, index) for index in range(self.count)}, by_s)

    def _look(self, index: int) -> Gpu:
        handle = self._handles[index] = self._call("nvmlDeviceGetHandleByIndex", index)
        uuid, name = self._call("nvmlDeviceGetUUID", handle), self._call("nvmlDeviceGetName", handle)
        limit_mw = int(self._call("nvmlDeviceGetPowerManagementLimit", handle))
        min_mw, max_mw = self._call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        default_mw = self._ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        power_mw = self._power_mw(handle)
        used = self._ask("nvmlDeviceGetUtilizationRates", handle)
        # The older name: the newer one is missing in drivers before 535, and this one is in all.
        reasons = int(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0)
        mig = self._ask("nvmlDeviceGetMigMode", handle)
        persistent = self._ask("nvmlDeviceGetPersistenceMode", handle)
        return Gpu(
            index=index,
            uuid=str(uuid),
            name=str(name),
            limit_mw=limit_mw,
            default_mw=None if default_mw is None else int(default_mw),
            min_mw=int(min_mw),
            max_mw=int(max_mw),
            power_w=None if power_mw is None else power_mw / 1000,
            utilization_pct=None if used is None else int(used.gpu),
            throttled=tuple(word for bit, word in _THROTTLED.items() if reasons & bit),
            mig=mig is not None and int(mig[0]) == 1,
            persistent=None if persistent is None else int(persistent) == 1,
        )

    def _power_mw(self, handle: object) -> int | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_POWER_INSTANT])
        if values is not None and values[0].nvmlReturn == 0:
            return int(values[0].value.uiVal)
        usual_mw = self._ask("nvmlDeviceGetPowerUsage", handle)
        return None if usual_mw is None else int(usual_mw)

    def health(self, by_s: float) -> dict[int, GpuHealth | NvmlError]:
        """Check that every GPU is there and healthy, by index; needs no power limits, which not every GPU has."""
        return bounded({index: partial(self._health, index) for index in range(self.count)}, by_s)

    def _health(self, index: int) -> GpuHealth:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        uuid, name = self._call("nvmlDeviceGetUUID", handle), self._call("nvmlDeviceGetName", handle)
        # Since Ampere: corrected and uncorrected rows, one is pending, a remapping has failed. Before it: pages.
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        pages = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOADED)
        waits = (("row_remap", rows is not None and bool(rows[2])), ("page_retirement", bool(pages)))
        return GpuHealth(
            uuid=str(uuid),
            name=str(name),
            pending=tuple(word for word, is_so in waits if is_so),
            worn=None if rows is None else bool(rows[3]),
            memory_errors=None if errors is None else int(errors),
        )

    def set_limits(self, limits_mw: Mapping[int, int], by_s: float) -> dict[int, int | NvmlError]:
        """Set power limits by index, and return what each GPU then reads."""
        return bounded({index: partial(self._set, index, mw) for index, mw in limits_mw.items()}, by_s)

    def _set(self, index: int, limit_mw: int) -> int:
        handle = self._handles[index]
        self._call("nvmlDeviceSetPowerManagementLimit", handle, limit_mw)
        reads_mw = int(self._call("nvmlDeviceGetPowerManagementLimit", handle))
        if abs(reads_mw - limit_mw) >= SAME_MW:
            msg = f"reads {reads_mw / 1000:g} W after {limit_mw / 1000:g} W was set"
            raise NvmlError(msg)
        return reads_mw
