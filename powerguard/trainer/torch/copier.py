"""Copies the tensors of a state into a snapshot: one plan, one stream and one wait for all of them.

The plan puts the items in this order, and a snapshot has them in it:

1. what lies in host memory. Small tensors of one dtype are joined in one call
2. small tensors on a GPU, joined there: one copy for many. What changes them afterwards does no harm
3. large tensors on a GPU that anything may change
4. large tensors on a GPU that only an optimizer changes: parameters, and its moments

Training waits for 1 to 4, or, where it lets copies overlap with the next step, for 1 to 3: the optimizer's next step is
then ordered behind the copies on the GPU itself. That something else changes a tensor of 4 meanwhile is seen by
torch's own count of changes in place (`Tensor._version`): such a copy is refused, and all later ones are made at once.
Torch counts neither fused operations nor writes through `.data`, so nothing overlaps that no hook has announced before.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import Lock
from typing import Any, Final

import torch

from powerguard.trainer.store.items import Item, PlannedItems
from powerguard.trainer.store.manifest import ALIGN, Layout, StoreError
from powerguard.trainer.store.shards import laid_out
from powerguard.trainer.torch.device import Device, DeviceError, Mark, Tensor
from powerguard.trainer.torch.tree import TensorItem, flat, local

OVERLAPS: Final = ("", "optimizer", "clone")
_JOINED: Final = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
"""The dtypes that torch joins as such; others are joined as bytes."""

_log = logging.getLogger("powerguard.trainer")

ReportCopied = Callable[[int], None]
"""Called with how many bytes of the snapshot, from its beginning, have arrived."""

_PLAIN, _SMALL_ON_HOST, _SMALL, _LARGE, _LATE = range(5)
_Place = tuple[int, str, str, Any]
"""Where an item goes: one of these five, the GPU and the dtype by name, and the GPU."""


_Memory = tuple[int, int]
"""The address and the size of a tensor."""


class ChangedError(StoreError):
    """A tensor was changed while it was copied, by something else than what waits for the copy."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was changed while it was copied, and not by the optimizer's step")


@dataclass(frozen=True, slots=True)
class Run:
    """Items that are copied alike, by number, and where their bytes lie in the snapshot.

    where: the GPU; None: host memory. joined: small tensors of one dtype. late: only an optimizer changes them.
    gaps: before which of its items so many bytes are left free.
    """

    first: int
    last: int
    start: int
    end: int
    where: Any
    joined: bool
    late: bool
    gaps: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Part:
    """Flat bytes on a GPU, and where they go. live: the tensor that may change them; None: they are our own copy."""

    start: int
    end: int
    source: Tensor
    name: str = ""
    live: Tensor | None = None
    late: bool = True


class Flight:
    """Bytes on their way into a snapshot. Asked by any thread; held up in training's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = Lock()
        self._marks: list[tuple[int, Mark]] = []
        self._last: dict[Any, Mark] = {}
        """The newest mark of each GPU: they do not wait for each other."""
        self._reached = 0
        self._arrived = 0
        self._sources: list[Tensor] = []
        """Kept until all have arrived: a tensor that training drops meanwhile is not freed."""
        self._watched: list[tuple[str, Tensor, int]] = []
        """What only an optimizer may change, and its count of changes when the copy began."""
        self._is_held_up = False
        self.failure: Exception | None = None
        """Why the copy is worth nothing."""

    def begin(self, end: int, batch: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin copies, behind those that have begun; with them all bytes up to `end` are there."""
        self._sources += [source for source, _ in batch]
        self._last[batch[0][0].device] = mark = self._device.begin(batch)
        self._marks.append((end, mark))

    @property
    def is_over(self) -> bool:
        """All have arrived, as far as `arrived` has seen."""
        return self._reached == len(self._marks)

    def watch(self, name: str, tensor: Tensor) -> None:
        """Refuse the copy if this tensor is changed before it is held up."""
        self._watched.append((name, tensor, tensor._version))  # noqa: SLF001 - torch has no public name for it

    def wait(self, end: int, report_copied: ReportCopied | None = None) -> None:
        """Wait until all bytes up to `end` are there. Raises what the device met."""
        for reached, mark in self._marks[self._reached :]:
            if self._arrived >= end:
                return
            self._device.wait(mark)
            self.arrived()
            if report_copied is not None:
                report_copied(reached)

    def arrived(self) -> int:
        """How many bytes have arrived, from the beginning of the snapshot. Raises what the device met; ChangedError."""
        with self._lock:
            self._look()
            if self.failure is not None:
                raise self.failure
            return self._arrived

    def hold_up(self) -> None:
        """Let what changes the tensors next come after the copies, on the GPU. Never waits, never raises."""
        with self._lock:
            try:
                self._look()
                if self._watched:
                    self._compare()
                    for mark in self._last.values():
                        self._device.hold_up(mark)
                    self._is_held_up = True
            except RuntimeError as error:  # training meets the same, if its GPU is broken
                self.failure = error

    def _look(self) -> None:
        """See what has arrived, and let go of everything once all has."""
        while not self.is_over and self._device.has_reached(self._marks[self._reached][1]):
            self._arrived = self._marks[self._reached][0]
            self._reached += 1
        if self.is_over:
            self._compare()
            self._sources.clear()
            self._watched.clear()

    def _compare(self) -> None:
        """Note a change by what was not held up: it came before this, and may be in the copy."""
        changed = (name for name, tensor, version in self._watched if tensor._version != version)  # noqa: SLF001
        if not self._is_held_up and self.failure is None and (name := next(changed, "")):
            self.failure = ChangedError(name)


class Copier:
    """Copies for one `TorchState`.

    overlap: "optimizer": what the optimizers change is copied while training goes on, up to their next step. "clone":
    all that lies on a GPU is copied there first, where it has room. "": training waits for all copies.
    how: in words, how the newest state was copied.
    """

    def __init__(self, device: Device, overlap: str = "", optimizers: Sequence[Any] = ()) -> None:
        self._device = device
        self._sizes = device.sizes
        self._overlap = overlap
        self._optimizers = [each for each in optimizers if isinstance(each, torch.optim.Optimizer)]
        self._stepped: set[int] = set()
        """The optimizers that have announced a step since the newest late copy, by id."""
        self._late: list[Flight] = []
        self._is_beginning = False
        """Copies are being given to the device. Still so afterwards: that was interrupted, and no flight has them."""
        self._where: Any = None
        self._registered: dict[int, list[int]] = {}
        """Snapshots by address, and where the pieces end that are registered of each."""
        self._refused: set[int] = set()
        """Those that cannot be registered."""
        self._loading = 0
        """The one that was last registered as a whole."""
        self._bounce: list[Tensor] = []
        self._unregistered = "its memory is not registered yet"
        self._no_overlap = ""
        self._has_room: dict[Any, bool] = {}
        """Of each GPU, whether it has room for a copy of what lies there."""
        self._structure: Sequence[Any] = ()
        self._order: list[int] = []
        self._plan = PlannedItems((), Layout((), 0), [])
        self.how = ""
        for each in optimizers:
            if isinstance(each, torch.optim.Optimizer):
                each.register_step_pre_hook(torch.compiler.disable(self.before_update))
            else:
                self._refuse_overlap(f"a {type(each).__qualname__} announces no steps: it is no torch.optim.Optimizer")

    def meet(self, tensors: Iterable[Tensor]) -> None:
        """Know a GPU by tensors on it before any state is copied: a snapshot that is first loaded can be registered."""
        self._where = next((each.device for each in tensors if self._device.owns(each)), None)

    # --- In the training thread, at a step boundary ------------------------------------------------------------------

    def begin(
        self, items: PlannedItems, memory: memoryview, report_copied: ReportCopied, *, late: bool
    ) -> Flight | None:
        """Copy into the snapshot. What is returned may still be on its way; None: all is there.

        late: training may go on before. Raises what the device meets; `land` before the memory is used again.
        """
        host = torch.frombuffer(memory, dtype=torch.uint8)
        self._forget_what_landed()
        runs = [run for run in items.runs if run.where is not None and run.end > run.start]
        is_registered = self._registered.get(host.data_ptr(), [0])[-1] >= items.layout.size_bytes
        is_late = late and bool(runs) and is_registered and self._may_be_late()
        theirs = self._theirs() if is_late and any(run.late for run in runs) else set()
        self.how = ""
        self._is_beginning = True
        with torch.no_grad():
            _copy_on_host(items, memory, host, report_copied)
            parts = [part for run in runs for part in self._parts(items, run, theirs, host, clone=is_late)]
        for where in dict.fromkeys(run.where for run in runs):
            self._device.follow(where)
        flight = None
        if parts and is_registered:
            flight = self._sent(parts, host, items.layout.size_bytes)
            at_once = max((part.end for part in parts if not part.late), default=0)
            flight.wait(at_once if is_late else items.layout.size_bytes, report_copied)
            self._late.append(flight)
            self.how = self._describe_copy(is_late=is_late, at_once=at_once, end=parts[-1].end)
        elif parts:
            self.how = f"at once, through buffers: {self._unregistered}"
            self._through_buffers(parts, host, report_copied)
        self._is_beginning = False
        return flight

    def _parts(
        self, items: PlannedItems, run: Run, theirs: set[_Memory], host: Tensor, *, clone: bool
    ) -> Iterator[Part]:
        """What there is to send of a run: small tensors joined, large ones as they lie, or as a copy on the GPU.

        Where one lies in no single piece, and the GPU has no room to put it in order, it is copied here and now.
        """
        if run.joined:
            with contextlib.suppress(torch.OutOfMemoryError):
                joined = self._device.empty(items[run.first].tensor, run.end - run.start, torch.uint8)
                _join(items, run, joined)
                yield Part(run.start, run.end, joined)
                return
        clone = clone and self._overlap == "clone" and self._may_clone(items, run.where)
        for item, entry in zip(items[run.first : run.last], items.layout.items[run.first : run.last], strict=True):
            if not entry.size_bytes:
                continue
            tensor, end = item.tensor, entry.offset + entry.size_bytes
            lies_flat = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            own = self._copied(tensor) if clone or not lies_flat else None
            if own is not None:
                yield Part(entry.offset, end, own)
                continue
            if clone:  # training has taken the room since the first one
                clone = self._has_room[run.where] = False
                self._refuse_overlap("the GPU has no room any more for a copy of the state")
            if not lies_flat:
                host[entry.offset : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.cpu())
                continue
            live = tensor if item.whole is None else item.whole
            # It may have become one that no optimizer has, since the plan was made.
            is_late = run.late and self._overlap == "optimizer" and _memory(tensor) in theirs
            yield Part(entry.offset, end, flat(tensor).view(torch.uint8), item.name, live, is_late)

    def _copied(self, tensor: Tensor) -> Tensor | None:
        """Return the flat bytes of a copy on the GPU, in C order; None where it has no room."""
        try:
            own = self._device.empty(tensor, tensor.nbytes, torch.uint8)
        except torch.OutOfMemoryError:
            return None
        own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return own

    def _sent(self, parts: Sequence[Part], host: Tensor, size_bytes: int) -> Flight:
        """Begin all copies."""
        flight = Flight(self._device)
        for part in parts:
            if part.late and part.live is not None:
                flight.watch(part.name, part.live)
        for batch in _batches(parts, self._sizes.batch):
            end = size_bytes if batch[-1][1] == parts[-1].end else batch[-1][1]
            flight.begin(end, [(source, host[start:stop]) for start, stop, source in batch])
        return flight

    def _through_buffers(self, parts: Sequence[Part], host: Tensor, report_copied: ReportCopied) -> None:
        """Copy through two pinned buffers in turn: one is filled by the GPU while the other is emptied.

        A GPU copies into ordinary memory at a fraction of the bus. An H100 copied 20 GB/s this way with 8 or more torch
        threads, and 5 GB/s with one: emptying the buffers is the limit.
        """
        try:
            self._bounce = self._bounce or [self._device.pinned(self._sizes.bounce) for _ in range(2)]
        except RuntimeError as error:
            why, _, _ = str(error).partition("\n")
            self.how = f"at once, without buffers: {why}"
            for part in parts:
                host[part.start : part.end].copy_(part.source)
                report_copied(part.end)
            return

        def finish(batch: Sequence[tuple[int, int, Tensor]], filled: Tensor, mark: Mark) -> None:
            self._device.wait(mark)
            for start, end, _ in batch:
                at = start % self._sizes.bounce
                host[start:end].copy_(filled[at : at + end - start])
            report_copied(batch[-1][1])

        under_way = None
        for turn, batch in enumerate(_batches(parts, self._sizes.bounce)):
            filled = self._bounce[turn % 2]
            targets = [filled[start % self._sizes.bounce :][: end - start] for start, end, _ in batch]
            mark = self._device.begin([(source, to) for (_, _, source), to in zip(batch, targets, strict=True)])
            if under_way is not None:
                finish(*under_way)
            under_way = batch, filled, mark
        if under_way is not None:
            finish(*under_way)

    # --- While training goes on --------------------------------------------------------------------------------------

    def before_update(self, optimizer: Any = None, *_: object) -> None:  # noqa: ANN401
        """Let what comes next on the GPU, and may change parameters or moments, come after their copies."""
        if self._device.is_recording():
            self._refuse_overlap("an optimizer's step was recorded in a CUDA graph, which calls no hooks")
            return
        self._stepped.add(id(optimizer))
        for flight in self._late:
            flight.hold_up()

    def _forget_what_landed(self) -> None:
        """Also what no thread asked for any more, because its write was given up."""
        for flight in self._late:
            with contextlib.suppress(RuntimeError, ChangedError):
                flight.arrived()
            if isinstance(flight.failure, ChangedError):
                self._refuse_overlap(str(flight.failure))
        self._late = [each for each in self._late if not (each.is_over or isinstance(each.failure, RuntimeError))]

    def _may_be_late(self) -> bool:
        """Whether each optimizer is known to announce its steps. A compiled or recorded one may not call the hook."""
        if any(group.get("capturable") for each in self._optimizers for group in each.param_groups):
            self._refuse_overlap("an optimizer is capturable, and a CUDA graph calls no hooks")
        if self._overlap != "optimizer" or self._no_overlap:
            return self._overlap == "clone"
        is_known = bool(self._optimizers) and self._stepped >= {id(each) for each in self._optimizers}
        self._stepped.clear()
        return is_known

    def _refuse_overlap(self, reason: str) -> None:
        if not self._no_overlap:
            self._no_overlap = reason
            _log.warning("training waits for each copy from now on: %s", reason)

    def _may_clone(self, items: PlannedItems, where: Any) -> bool:  # noqa: ANN401
        """Whether a copy of all fits into what training has never used; found out once, before the first one."""
        if where not in self._has_room:
            need = sum(run.end - run.start for run in items.runs if run.where == where)
            self._has_room[where] = self._device.room(where) >= need + self._sizes.spare
            if not self._has_room[where]:
                self._no_overlap = f"the GPU has no room for a copy of {need} bytes"
                _log.warning("training waits for each copy: %s", self._no_overlap)
        return self._has_room[where]

    def _describe_copy(self, *, is_late: bool, at_once: int, end: int) -> str:
        if not is_late or at_once == end:
            return f"at once ({self._no_overlap})" if self._no_overlap else "at once"
        return f"while training went on, {at_once} bytes of it at once" if at_once else "while training went on"

    # --- In the writer's thread --------------------------------------------------------------------------------------

    def land(self) -> None:
        """Wait until nothing is on its way any more, also of a copy that was interrupted. Any thread."""
        if self._is_beginning or not all(flight.is_over for flight in self._late):
            with contextlib.suppress(RuntimeError):  # training meets the same
                self._device.land()

    @property
    def may_register(self) -> bool:
        """Whether a tensor on a GPU was seen."""
        return self._where is not None

    def register(self, memory: memoryview, *, whole: bool = False) -> bool:
        """Register the next piece of a snapshot. False: there is none, or it cannot be done.

        whole: as one piece, which takes 0.3 s for 13 GB. A load needs it: it knows nothing of pieces, and CUDA refuses
        a copy that reaches from one into the next ("invalid argument", seen on an H100).
        """
        address = _address(memory)
        if whole:
            self._loading = address
        if whole and self._registered.get(address, [len(memory)]) != [len(memory)]:
            self.unregister(memory)
        ends = self._registered.get(address, [])
        done = ends[-1] if ends else 0
        if not self.may_register or address in self._refused or done >= len(memory):
            return False
        end = len(memory) if whole else min(done + self._sizes.registered, len(memory))
        try:
            self._device.register(self._where, address + done, end - done)
        except DeviceError as error:
            self._unregistered = str(error)
            _log.warning("host memory cannot be registered, and copies are slower: %s", error)
            self.unregister(memory)
            self._refused.add(address)
            return False
        self._registered[address] = [*ends, end]
        return True

    def unregister(self, memory: memoryview) -> None:
        """Take it back, before the memory is given back. Nothing may be on its way into it."""
        self._refused.discard(_address(memory))
        self._unregister(_address(memory))

    def unregister_loaded(self) -> bool:
        """Take back what was registered for the load that is under way; say whether there was any."""
        was_registered = self._loading in self._registered
        self._unregister(self._loading)
        return was_registered

    def _unregister(self, address: int) -> None:
        for start in [0, *self._registered.pop(address, [])][:-1]:
            try:
                self._device.unregister(self._where, address + start)
            except DeviceError as error:
                _log.warning("host memory stays registered: %s", error)

    def forsake(self) -> None:
        """In a child of fork: the GPU, and what is registered with it, are the parent's."""
        self._where, self._is_beginning = None, False
        self._registered.clear()
        self._late.clear()

    # --- The plan ----------------------------------------------------------------------------------------------------

    def arranged(self, items: Sequence[Item], structure: Sequence[Any] = ()) -> PlannedItems:
        """Put items in the order in which they are copied.

        structure: equal to the last one where only the contents differ, and the plan is still right; one of a single
        part says nothing.
        """
        if structure != self._structure or len(structure) < 2:
            self._structure = ()  # until the plan is whole: what interrupts this must leave no other state's
            theirs = self._theirs()
            places = [self._place(item, theirs) for item in items]
            self._order = sorted(range(len(items)), key=lambda number: places[number][:3])
            layout = laid_out([items[number] for number in self._order])
            self._plan = PlannedItems((), layout, [])
            for place, group in groupby(range(len(items)), key=lambda at: places[self._order[at]]):
                numbers = list(group)
                joined = self._sizes.joined if place[0] == _SMALL else self._sizes.joined_on_host
                self._plan.runs += _runs(place, numbers[0], numbers[-1] + 1, layout, joined)
            self._structure = structure
            self._where = next((run.where for run in self._plan.runs if run.where is not None), self._where)
        return PlannedItems((items[number] for number in self._order), self._plan.layout, self._plan.runs)

    def _theirs(self) -> set[_Memory]:
        """Where the parameters and moments of the optimizers lie: nothing else changes these."""
        tensors = [param for each in self._optimizers for group in each.param_groups for param in group["params"]]
        parts = (part for each in self._optimizers for part in each.state.values() if isinstance(part, dict))
        tensors += [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
        return {_memory(local(each)) for each in tensors}

    def _place(self, item: Item, theirs: set[_Memory]) -> _Place:
        """Where an item goes."""
        if not isinstance(item, TensorItem):
            return _PLAIN, "", "", None
        tensor, size_bytes = item.tensor, item.size_bytes
        if not self._device.owns(tensor):
            small = size_bytes < self._sizes.small_on_host and tensor.device.type == "cpu"
            return (_SMALL_ON_HOST, "", item.dtype, None) if small else (_PLAIN, "", "", None)
        where = tensor.device
        if size_bytes < self._sizes.small:
            return _SMALL, str(where), item.dtype, where
        is_late = _memory(tensor) in theirs and not tensor.is_inference()
        return _LATE if is_late else _LARGE, str(where), "", where


def _runs(place: _Place, first: int, last: int, layout: Layout, joined: int) -> Iterator[Run]:
    """Cut a row of items that are alike into runs: small ones are joined up to a size."""
    is_joined = place[0] in (_SMALL_ON_HOST, _SMALL)
    begun, gaps, end = first, [], layout.items[first].offset
    for number in range(first, last):
        entry, start = layout.items[number], layout.items[begun].offset
        if entry.offset > end:
            gaps.append((number - begun, entry.offset - end))
        end = entry.offset + entry.size_bytes
        is_last = number + 1 == last
        if is_last or (is_joined and layout.items[number + 1].offset - start >= joined):
            yield Run(begun, number + 1, start, end, place[3], is_joined, place[0] == _LATE, gaps)
            begun, gaps, end = number + 1, [], _aligned(end)


def _address(memory: memoryview) -> int:
    return int(torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) if len(memory) else 0


def _memory(tensor: Tensor) -> _Memory:
    return tensor.data_ptr(), tensor.nbytes


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGN


def _join(items: PlannedItems, run: Run, target: Tensor) -> None:
    """Copy small tensors of one dtype into flat bytes, as they lie in the snapshot, with zeros in between."""
    tensors = [item.tensor for item in items[run.first : run.last]]
    kind = tensors[0].dtype if tensors[0].dtype in _JOINED else torch.uint8
    if kind is torch.uint8:
        flats = [flat(tensor).view(torch.uint8) for tensor in tensors]
    else:
        flats = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    zeros = torch.zeros(ALIGN, dtype=torch.uint8, device=target.device).view(kind)
    fills = {gap: zeros[: gap // zeros.element_size()] for _, gap in run.gaps}
    parts, done = [], 0
    for number, gap in run.gaps:
        parts += [*flats[done:number], fills[gap]]
        done = number
    parts += flats[done:]
    torch.cat(parts, out=target.view(kind))


def _copy_on_host(items: PlannedItems, memory: memoryview, host: Tensor, report_copied: ReportCopied) -> None:
    """Copy what lies in host memory, and clear the gaps between all items."""
    for run in items.runs:
        if run.joined:
            if run.where is None:
                _join(items, run, host[run.start : run.end])
                report_copied(run.end)
            memory[run.end : run.end + -run.end % ALIGN] = bytes(-run.end % ALIGN)
            continue
        for item, entry in zip(items[run.first : run.last], items.layout.items[run.first : run.last], strict=True):
            end = entry.offset + entry.size_bytes
            if run.where is None:
                item.copy_to(memory[entry.offset : end])
                report_copied(end)
            memory[end : end + -end % ALIGN] = bytes(-end % ALIGN)


def _batches(parts: Iterable[Part], limit: int) -> Iterator[list[tuple[int, int, Tensor]]]:
    """Cut at multiples of `limit` in the snapshot, and gather what lies between two of them, on one GPU."""
    batch: list[tuple[int, int, Tensor]] = []
    for part in parts:
        start = part.start
        while start < part.end:
            end = min(part.end, start - start % limit + limit)
            piece = part.source[start - part.start : end - part.start]
            if batch and (batch[0][0] // limit != start // limit or batch[0][2].device != piece.device):
                yield batch
                batch = []
            batch.append((start, end, piece))
            start = end
    if batch:
        yield batch
