"""What a snapshot needs of the GPUs of one process, behind one small port.

Copies run on a stream of their own. What training does meanwhile is ordered by events alone: the copies begin when the
work that training has given to the GPU so far is done, and training's next write to what is copied waits for a mark.
Everything above the port is tested on the CPU, with a device that copies late and out of order. `tests/gpu` has the
same tests for a real one: they ran on an H100.
"""

import contextlib
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

Tensor = Any
"""A torch.Tensor; a name of our own, because torch's types are not known where torch is not installed."""

Mark = Any
"""The end of a batch of copies; the device's own."""

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every GPU of this process


class DeviceError(Exception):
    """What a device cannot do here, and why."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """In bytes, what is best on a device; those of an H100.

    small: tensors below this are joined: a copy of its own takes as long as 0.5 MB on the bus. small_on_host: the same
    where they lie in host memory. joined, joined_on_host: up to this size, so that the GPU needs no large piece of free
    memory, and the host no view of each tensor at a time.
    batch: copies between two marks, about a millisecond on the bus; they end at its multiples in the snapshot.
    registered: pieces of host memory, a multiple of a batch: no copy may reach over their ends. bounce: each of the two
    buffers, where the snapshot cannot be registered. spare: what a clone leaves free on the GPU.
    """

    small: int = 1 << 20
    small_on_host: int = 64 << 10
    joined: int = 256 << 20
    joined_on_host: int = 8 << 20
    batch: int = 64 << 20
    registered: int = 256 << 20
    bounce: int = 16 << 20
    spare: int = 1 << 30


class Device(Protocol):
    """The GPUs of one process. `where` is a torch.device."""

    @property
    def sizes(self) -> Sizes: ...

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on one of them."""
        ...

    def register(self, where: Any, address: int, size_bytes: int) -> None:  # noqa: ANN401
        """Let copies reach this host memory at the speed of the bus. Raises DeviceError."""
        ...

    def unregister(self, where: Any, address: int) -> None:  # noqa: ANN401
        """Take that back, before the memory is given back. Raises DeviceError."""
        ...

    def pinned(self, size_bytes: int) -> Tensor:
        """Return host memory that copies reach at the speed of the bus."""
        ...

    def empty(self, like: Tensor, elements: int, dtype: Any) -> Tensor:  # noqa: ANN401
        """Return memory on the GPU of a tensor. Raises torch.OutOfMemoryError."""
        ...

    def room(self, where: Any) -> int:  # noqa: ANN401
        """How many bytes of this GPU training has never used so far."""
        ...

    def follow(self, where: Any) -> None:  # noqa: ANN401
        """Let the copies that begin from now on come after all that training has given to this GPU so far."""
        ...

    def begin(self, batch: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """Begin copies from one GPU to host memory, flat bytes each; the mark is reached when all have arrived."""
        ...

    def has_reached(self, mark: Mark) -> bool:
        """Whether all copies up to this mark have arrived. Never waits. Raises what the device met."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait for that. Raises what the device met."""
        ...

    def land(self) -> None:
        """Wait until no copy is on its way, also of a batch whose beginning was interrupted. Raises what it met."""
        ...

    def hold_up(self, mark: Mark) -> None:
        """Let what training gives to the GPU from now on come after this mark. Returns at once."""
        ...

    def is_recording(self) -> bool:
        """Whether training is recording a CUDA graph just now: what is called here will not be called when it runs."""
        ...


class CudaDevice:
    """The GPUs that torch calls "cuda"; those of ROCm, too. Makes no CUDA call before it sees a tensor on one."""

    sizes = Sizes()

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def owns(self, tensor: Tensor) -> bool:
        return bool(tensor.is_cuda)

    def register(self, where: Any, address: int, size_bytes: int) -> None:  # noqa: ANN401
        self._call(where, "cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, where: Any, address: int) -> None:  # noqa: ANN401
        self._call(where, "cudaHostUnregister", address)

    def _call(self, where: Any, name: str, *arguments: int) -> None:  # noqa: ANN401
        try:
            with torch.cuda.device(where):  # a thread begins on the first GPU, and would make a context there
                cudart = torch.cuda.cudart()
                result = getattr(cudart, name)(*arguments)
                trouble = "" if int(result) == 0 else str(cudart.cudaGetErrorString(result))
                if trouble:
                    _take_error(where)
        except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
            trouble = " ".join(str(error).split())[:120]
        if trouble:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "" if soft == resource.RLIM_INFINITY else f" (RLIMIT_MEMLOCK: {soft} bytes)"
            msg = f"{name}: {trouble}{limit}"
            raise DeviceError(msg)

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, like: Tensor, elements: int, dtype: Any) -> Tensor:  # noqa: ANN401
        return torch.empty(elements, dtype=dtype, device=like.device)

    def room(self, where: Any) -> int:  # noqa: ANN401
        free, _ = torch.cuda.mem_get_info(where)
        # Training may reset its peak or empty its cache at every step, but hardly does both.
        emptied = max(0, torch.cuda.max_memory_allocated(where) - torch.cuda.memory_reserved(where))
        return int(free - emptied)

    def follow(self, where: Any) -> None:  # noqa: ANN401
        if where.index not in self._streams:
            self._streams[where.index] = torch.cuda.Stream(where)
        self._streams[where.index].wait_stream(torch.cuda.current_stream(where))

    def begin(self, batch: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        where = batch[0][0].device
        stream = self._streams[where.index]
        with torch.cuda.stream(stream):
            for source, target in batch:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)  # freed meanwhile, its memory is not used again before
            event = torch.cuda.Event()
            event.record(stream)
        return where, event

    def has_reached(self, mark: Mark) -> bool:
        with torch.cuda.device(mark[0]):
            return bool(mark[1].query())

    def wait(self, mark: Mark) -> None:
        with torch.cuda.device(mark[0]):
            mark[1].synchronize()

    def land(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.synchronize()

    def hold_up(self, mark: Mark) -> None:
        torch.cuda.current_stream(mark[0]).wait_event(mark[1])

    def is_recording(self) -> bool:
        return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _take_error(where: Any) -> None:  # noqa: ANN401
    """Take away the error that a refused call has left in this thread: torch would raise it at the next launch here.

    cudart's binding in torch returns the code, and does not clear it (cudaGetLastError): a launch of our own does.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=where).add_(1)
