"""A device for tests, in host memory: it copies late, out of order, and only into memory that it was told of.

Tensors that it takes for its own are ordinary ones. A copy reads its source when a thread comes to it, some time after
it was begun, or when something waits for it: whoever changes the source before has changed the copy. What a GPU would
answer with a wrong byte or worse is kept in `faults`.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from powerguard.trainer.torch.device import DeviceError, Sizes

_BYTE = 0xEE
_HURRIED = 0.2
"""How often asking whether copies have arrived makes them, where there is no thread."""


SIZES = Sizes(small=2048, small_on_host=512, joined=4096, batch=4096, registered=16384, bounce=2048, spare=0)
"""Sizes at which a small model has tensors of each kind, and many batches and pieces."""


class LateDevice:
    """owns: which tensors lie on it. slowest_s: how late its thread may be; None: it copies when asked or waited for.

    cannot_register: why registering fails, from the piece number `fails_at` on. cannot_pin: why there are no buffers.
    breaks_at: the copy that fails.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        slowest_s: float | None = 0.02,
        owns: Callable[[Any], bool] = torch.is_floating_point,
        cannot_register: str = "",
        fails_at: int = 0,
        cannot_pin: str = "",
        breaks_at: int | None = None,
        free_bytes: int = 2**40,
        sizes: Sizes = SIZES,
    ) -> None:
        self.sizes = sizes
        self._chance = random.Random(seed)
        self._slowest_s = slowest_s
        self._owns = owns
        self._cannot_register = cannot_register
        self._fails_at = fails_at
        self._cannot_pin = cannot_pin
        self.breaks_at = breaks_at
        self.free_bytes = free_bytes
        self.recording = self.stuck = False
        self.faults: list[str] = []
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.copies = self.held_up = 0
        self._pinned: list[Any] = []
        self._lock = threading.RLock()
        self._jobs: list[tuple[int, Any, Any]] = []
        self._batches = 0
        self._broken = ""
        self._follows = False
        if slowest_s is not None:
            threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_copying(self) -> bool:
        """Copies have begun, and were not made yet."""
        return bool(self._jobs)

    # --- The port ----------------------------------------------------------------------------------------------------

    def owns(self, tensor: Any) -> bool:
        return self._owns(tensor)

    def register(self, where: Any, address: int, size_bytes: int) -> None:
        self.calls.append(threading.current_thread().name)
        if self._cannot_register and len(self.registered) >= self._fails_at:
            raise DeviceError(self._cannot_register)
        if address in self.registered:
            self.faults.append("registered twice")
        (ctypes.c_char * size_bytes).from_address(address)[0]  # it is there
        self.registered[address] = size_bytes

    def unregister(self, where: Any, address: int) -> None:
        with self._lock:
            size_bytes = self.registered.pop(address, 0)
            if not size_bytes:
                self.faults.append("unregistered what was not registered")
            if any(address <= target.data_ptr() < address + size_bytes for _, _, target in self._jobs):
                self.faults.append("unregistered while a copy was on its way")

    def pinned(self, size_bytes: int) -> Any:
        if self._cannot_pin:
            raise RuntimeError(self._cannot_pin)
        self._pinned.append(torch.full((size_bytes,), _BYTE, dtype=torch.uint8))
        return self._pinned[-1]

    def empty(self, like: Any, elements: int, dtype: Any) -> Any:
        size_bytes = elements * torch.empty(0, dtype=dtype).element_size()
        if size_bytes > self.free_bytes:
            msg = "no room on the device"
            raise torch.OutOfMemoryError(msg)
        self._follows = False  # what fills it comes after all that was followed so far
        return torch.full((elements,), _BYTE, dtype=torch.uint8).view(dtype)

    def room(self, where: Any) -> int:
        return self.free_bytes

    def follow(self, where: Any) -> None:
        self._follows = True

    def begin(self, batch: Sequence[tuple[Any, Any]]) -> int:
        with self._lock:
            self._batches += 1
            for source, target in batch:
                self._check(source, target)
                target.fill_(_BYTE)
                self._jobs.append((self._batches, source, target))
            return self._batches

    def _check(self, source: Any, target: Any) -> None:
        start, end = target.data_ptr(), target.data_ptr() + target.numel()
        spans = [*self.registered.items(), *((each.data_ptr(), each.numel()) for each in self._pinned)]
        if not any(first <= start and end <= first + size for first, size in spans):
            self.faults.append("a copy into memory that is not registered in one piece")
        if not self._follows:
            self.faults.append("a copy that does not wait for the work before it")
        if source.dtype != torch.uint8 or source.numel() != target.numel():
            self.faults.append("a copy of other bytes than it has room for")

    def has_reached(self, mark: int) -> bool:
        with self._lock:
            if self._slowest_s is None and not self.stuck and self._chance.random() < _HURRIED:
                self._work(mark)
            self._raise()
            return all(number > mark for number, _, _ in self._jobs)

    def wait(self, mark: int) -> None:
        self._work(mark)
        self._raise()

    def land(self) -> None:
        self._work(self._batches)
        self._raise()

    def hold_up(self, mark: int) -> None:
        self.held_up += 1
        self._work(mark)

    def is_recording(self) -> bool:
        return self.recording

    # --- Its copies --------------------------------------------------------------------------------------------------

    def _raise(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    def _work(self, mark: int) -> None:
        """Copy all up to this mark, in any order."""
        with self._lock:
            due = [job for job in self._jobs if job[0] <= mark]
            self._chance.shuffle(due)
            for job in due:
                self._copy(job)

    def _run(self) -> None:
        while True:
            time.sleep(self._chance.random() * (self._slowest_s or 0.0))
            with self._lock:
                for job in self._chance.sample(self._jobs, min(len(self._jobs), 20)):
                    self._copy(job)

    def _copy(self, job: tuple[int, Any, Any]) -> None:
        self._jobs = [each for each in self._jobs if each is not job]
        self.copies += 1
        if self.breaks_at is not None and self.copies > self.breaks_at:
            self._broken = "CUDA error: an illegal memory access was encountered"
        if not self._broken:
            job[2].copy_(job[1])
