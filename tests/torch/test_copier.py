"""Copies of a state on a device, on a device that copies late and out of order: every byte, under every overlap.

The device is tests/torch/late_device.py. What needs a real GPU is in tests/gpu.
"""

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from powerguard.trainer import Guard
from powerguard.trainer.store.shards import CancelledError, Snapshot, laid_out
from powerguard.trainer.torch import TorchState, copier
from powerguard.trainer.torch.copier import ChangedError, Flight
from powerguard.trainer.torch.device import CudaDevice
from powerguard.trainer.torch.state import StateError
from powerguard.trainer.torch.tree import DTYPES, TensorItem
from tests.torch import late_device
from tests.torch.copied import OPTIMIZERS, Training, training
from tests.torch.kept import kept
from tests.torch.late_device import LateDevice


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)  # several tests run at a time, and none has much to compute


# --- Every byte ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("overlap", copier.OVERLAPS)
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("slowest_s", [None, 0.002], ids=["when asked", "late"])
def test_training_goes_on_and_every_byte_is_of_the_boundary(
    make: str, overlap: str, batches: int, slowest_s: float | None
) -> None:
    device = LateDevice(seed=batches, slowest_s=slowest_s)
    with training(device, overlap, make=OPTIMIZERS[make], batches=batches) as rig:
        for _ in range(12):
            expected, found = rig.expected(), rig.taken()
            assert ("while training went on" in rig.state.copier.how) == bool(overlap)
            rig.step()
            assert found() == expected
            rig.step()


class Careless(LateDevice):
    """Orders nothing."""

    def hold_up(self, mark: int) -> None:
        pass


def test_the_device_of_these_tests_finds_a_wait_that_is_missing() -> None:
    with training(Careless(slowest_s=None)) as rig:
        expected, found = rig.expected(), rig.taken()
        rig.step()
        assert found() != expected


def test_small_tensors_are_joined_and_the_large_ones_stay_where_they_are() -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        begun = device.copies
        rig.taken(late=False)()
        large = [item for item in rig.state.items() if isinstance(item, TensorItem) and item.size_bytes >= 2048]
        pieces = sum(-(-item.size_bytes // 4096) + 1 for item in large)
        assert device.copies - begun <= pieces + 2, "20 small tensors are one or two copies"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("registered", [False, True])
def test_tensors_of_all_kinds(*, late: bool, registered: bool) -> None:
    """Every dtype, empty and single ones, strides, views that are conjugated or negated: on the device and not."""
    values = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0,), (3,), (67, 5), (40, 33)):
            size = torch.empty(shape, dtype=dtype, device="meta").nbytes
            noise = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8)
            values[f"{name}{shape}"] = noise.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    for name in ("int16", "uint32", "complex64"):
        values[f"column of {name}"] = torch.ones(9, 2).to(DTYPES[name])[:, 1]
        values[f"repeated {name}"] = torch.ones(1).to(DTYPES[name]).expand(9)
    values["turned"] = torch.randn(30, 41).t()
    values["conjugated"] = torch.randn(20, 30, dtype=torch.complex64).conj()
    values["negated"] = torch.randn(20, 30, dtype=torch.complex64).conj().imag
    values["few conjugated"] = torch.randn(2, 3, dtype=torch.complex64).conj()
    values["few negated"] = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    for owned in (True, False):
        device = LateDevice(slowest_s=None, owns=lambda _tensor, owned=owned: owned)
        state = TorchState(model=nn.Linear(2, 2), extra={"all": values}, device=device, overlap="clone")
        with Snapshot(copier=state.copier) as snapshot:
            items = state.items()
            snapshot.reserve(laid_out(items).size_bytes)
            while registered and snapshot.register():
                pass
            snapshot.buffer[:] = b"\xaa" * len(snapshot.buffer)
            layout = snapshot.take(items, late=late)
            snapshot.wait_arrived(layout.size_bytes)
            end = 0
            for item, entry in zip(items, layout.items, strict=True):
                assert not any(snapshot.buffer[end : entry.offset]), "nothing old lies between items"
                end = entry.offset + entry.size_bytes
                kept = bytearray(entry.size_bytes)
                item.copy_to(memoryview(kept))
                assert bytes(snapshot.buffer[entry.offset : end]) == kept, item.name
            assert not any(snapshot.buffer[end : layout.size_bytes])
        assert not device.faults


def test_a_structure_that_changes_between_steps() -> None:
    with training(LateDevice()) as rig:
        for size in (10, 3000, 10, 100_000):
            rig.average.append(torch.randn(size))
            expected, found = rig.expected(), rig.taken()
            rig.average[-1].zero_()
            del rig.average[-1]
            assert found() == expected
            while rig.snapshot.register():
                pass


def test_what_training_drops_or_replaces_meanwhile_is_still_copied() -> None:
    with training(LateDevice(slowest_s=None)) as rig:
        expected, found = rig.expected(), rig.taken()
        for param in rig.model.parameters():
            param.data = torch.zeros(7)
        rig.optimizer.state.clear()
        assert found() == expected


def cut(call: Callable[[], object], at: int) -> bool:
    """Interrupt it at the nth call or return in the copier or the device. False: it makes fewer."""
    left, ours = [at], (copier.__file__, late_device.__file__)

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code  # a generator that is closed would swallow it
        left[0] -= event in ("call", "return") and code.co_filename in ours and not code.co_flags & inspect.CO_GENERATOR
        if not left[0]:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "through buffers"])
def test_what_an_interrupted_copy_began_has_landed_before_the_memory_is_used_again(*, registered: bool) -> None:
    """Ctrl-C anywhere in it, and training goes on: its bytes would come into what is restored or taken next."""
    device = LateDevice(slowest_s=None, cannot_register="" if registered else "no")
    with training(device) as rig:
        at = 1
        while cut(lambda: rig.snapshot.take(rig.state.items(), late=True), at):
            at += 1 if registered else 3
            if at % 2:
                rig.snapshot.reserve(rig.snapshot.size_bytes)
                rig.snapshot.buffer[:] = b"\xaa" * rig.snapshot.size_bytes
                device.land()
                assert rig.snapshot.buffer == b"\xaa" * rig.snapshot.size_bytes, at
            rig.step()
            expected, found = rig.expected(), rig.taken()
            rig.step()
            assert found() == expected, at
        assert at > 200


def test_a_child_of_fork_waits_for_no_copy_that_was_interrupted() -> None:
    """The GPU is the parent's: a child that waits for it may hang."""
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        interrupted = (at for at in range(1, 1000) if cut(lambda: rig.snapshot.take(rig.state.items(), late=True), at))
        assert any(device.is_copying for _ in interrupted)
        rig.state.copier.forsake()
        rig.state.copier.land()
        assert device.is_copying
        device.land()
        device.registered.clear()


# --- What may not be late ---------------------------------------------------------------------------------------------


def test_a_change_that_no_optimizer_announced_is_refused_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with training(LateDevice(slowest_s=None)) as rig:
        found = rig.taken()
        with torch.no_grad():
            rig.model[3].weight.mul_(2.0)
        with pytest.raises(ChangedError, match=r"model/state/3\.weight was changed while it was copied"):
            found()
        with pytest.raises(ChangedError):
            found()
        rig.step()
        expected, again = rig.expected(), rig.taken()
        rig.step()
        assert again() == expected
        assert (
            rig.state.copier.how
            == "at once (model/state/3.weight was changed while it was copied, and not by the optimizer's step)"
        )
    why = "model/state/3.weight was changed while it was copied, and not by the optimizer's step"
    assert [each.message for each in caplog.records] == [f"training waits for each copy from now on: {why}"]


def test_a_change_between_the_boundary_and_the_optimizers_step_is_refused() -> None:
    with training(LateDevice(slowest_s=None)) as rig:
        found = rig.taken()
        with torch.no_grad():
            rig.model[3].weight.mul_(2.0)
        rig.step()
        with pytest.raises(ChangedError):
            found()


def test_a_change_that_was_announced_waits() -> None:
    with training(LateDevice(slowest_s=None)) as rig:
        for _ in range(3):
            expected, found = rig.expected(), rig.taken()
            rig.state.copier.before_update()
            rig.model[3].weight.data.mul_(2.0)
            rig.step()
            assert found() == expected
        assert rig.state.copier.how.startswith("while training went on")


def test_a_parameter_that_the_optimizer_does_not_have_is_waited_for() -> None:
    """It replaced one of the same name and shape: whoever changes it announces nothing."""
    with training(LateDevice(slowest_s=None)) as rig:
        rig.taken()()
        rig.model[3].weight = nn.Parameter(rig.model[3].weight.detach().clone())
        rig.step()
        expected, found = rig.expected(), rig.taken()
        assert rig.state.copier.how.startswith("while training went on")
        rig.model[3].weight.data.mul_(2.0)  # torch does not count this
        assert found() == expected


@pytest.mark.parametrize("what", ["exp_avg", "data"])
def test_a_tensor_that_was_swapped_for_another_of_its_kind_is_copied_late(what: str) -> None:
    with training(LateDevice(slowest_s=None)) as rig:
        for _ in range(3):
            weight = rig.model[3].weight
            if what == "data":
                weight.data = torch.randn_like(weight)
            else:
                rig.optimizer.state[weight][what] = torch.randn_like(weight)
            expected, found = rig.expected(), rig.taken()
            assert rig.state.copier.how.startswith("while training went on")
            rig.step()
            assert found() == expected


def test_a_state_is_loaded_behind_the_copies_that_are_under_way() -> None:
    """Training is rolled back in the middle of one: that copy is whole, and later ones overlap as before."""
    with training(LateDevice(slowest_s=None)) as rig:
        older = kept(rig.state.items())
        rig.step()
        expected, found = rig.expected(), rig.taken()
        rig.state.load(older)
        assert found() == expected
        rig.step()
        rig.taken()()
        assert rig.state.copier.how.startswith("while training went on")


class TwoDevices(LateDevice):
    """Marks are numbers; what each of two GPUs was told to wait for. The second one's tensors are on "meta"."""

    def __init__(self) -> None:
        super().__init__(slowest_s=None)
        self.held: list[int] = []
        self.waited: list[int] = []

    def begin(self, batch: Sequence[tuple[Any, Any]]) -> int:
        self._batches += 1
        return self._batches

    def has_reached(self, mark: int) -> bool:
        return mark in self.waited

    def wait(self, mark: int) -> None:
        self.waited.append(mark)

    def hold_up(self, mark: int) -> None:
        self.held.append(mark)


def test_each_gpu_waits_for_its_own_copies() -> None:
    """A model on two GPUs: a mark of one says nothing of the other, which would step into its copy."""
    device = TwoDevices()
    flight = Flight(device)
    first, second = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8, device="meta")
    for end, source in ((4, first), (8, first), (12, second)):
        flight.begin(end, [(source, torch.zeros(4, dtype=torch.uint8))])
    flight.watch("first", first)
    flight.hold_up()
    assert device.held == [2, 3]


def test_an_optimizer_that_announces_nothing_is_waited_for() -> None:
    """As one whose step was compiled, or recorded in a graph before: no hook of it ever runs."""
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        step = type(rig.optimizer).step.__wrapped__  # without torch's profiling, which calls the hooks
        rig.taken()()
        for _ in range(3):
            step(rig.optimizer)
            expected, found = rig.expected(), rig.taken()
            step(rig.optimizer)
            assert found() == expected
        assert not device.held_up


def test_all_optimizers_must_have_announced_a_step() -> None:
    device = LateDevice(slowest_s=None)
    models = [nn.Linear(40, 40), nn.Linear(40, 40)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    state = TorchState(model=models, optimizer=optimizers, overlap="optimizer", device=device)
    with Snapshot(copier=state.copier) as snapshot:
        snapshot.reserve(laid_out(state.items()).size_bytes)
        while snapshot.register():
            pass
        for stepped, is_late in (([0], False), ([0, 1], True), ([], False), ([1], False), ([0], False)):
            for each in stepped:
                optimizers[each].step()
            snapshot.take(state.items(), late=True)
            assert state.copier.how.startswith("while training went on") == is_late


@pytest.mark.parametrize("how", ["capturable", "recorded", "no optimizer of torch's"])
def test_a_step_in_a_graph_is_never_overlapped(how: str) -> None:
    device = LateDevice(slowest_s=None)

    class Own:
        param_groups: list[Any] = []

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with training(device) as rig:
        if how == "capturable":
            rig.optimizer.param_groups[0]["capturable"] = True
        elif how == "recorded":
            device.recording = True
            rig.optimizer.step()
            device.recording = False
            rig.optimizer.step()
        else:
            rig.state.copier = TorchState(model=rig.model, optimizer=Own(), overlap="optimizer", device=device).copier
            rig.snapshot.close()
            rig.snapshot = Snapshot(copier=rig.state.copier)
            rig.register()
        expected, found = rig.expected(), rig.taken()
        assert rig.state.copier.how.startswith("at once (")
        assert found() == expected


def test_an_emergency_is_copied_at_once() -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        expected = rig.expected()
        found = rig.taken(late=False)
        for param in rig.model.parameters():
            param.data.zero_()
        assert found() == expected


def test_a_word_that_is_no_overlap_is_refused() -> None:
    with pytest.raises(StateError, match="overlap='yes': must be one of '', 'optimizer', 'clone'"):
        TorchState(model=nn.Linear(1, 1), overlap="yes")


# --- Registered memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 2])
def test_memory_that_cannot_be_registered_is_reported_and_copied_through_buffers(
    fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    why = "cudaHostRegister: out of memory (RLIMIT_MEMLOCK: 65536 bytes)"
    device = LateDevice(slowest_s=None, cannot_register=why, fails_at=fails_at)
    with training(device) as rig:
        assert not device.registered, "what was registered of it is given back"
        asked = len(device.calls)
        assert not rig.snapshot.register()
        assert len(device.calls) == asked, "it is tried once"
        expected, found = rig.expected(), rig.taken()
        for param in rig.model.parameters():
            param.data.zero_()
        assert found() == expected
        assert rig.state.copier.how == f"at once, through buffers: {why}"
    assert [each.message for each in caplog.records] == [
        f"host memory cannot be registered, and copies are slower: {why}"
    ]


def test_where_no_memory_can_be_pinned_either_it_is_copied_as_it_is() -> None:
    device = LateDevice(slowest_s=None, cannot_register="no", cannot_pin="CUDA error: out of memory\nCompile with")
    with training(device) as rig:
        expected, found = rig.expected(), rig.taken()
        rig.step()
        assert found() == expected
        assert rig.state.copier.how == "at once, without buffers: CUDA error: out of memory"


class Choosy(torch.optim.AdamW):
    """Loads nothing from registered memory, and breaks off with half of it loaded; `device` is the GPU's."""

    device: LateDevice
    error: Exception
    fails: bool

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fails or self.device.registered:
            raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: invalid argument"), StateError("moments: CUDA error: invalid argument")]
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_cannot_be_loaded_from_registered_memory_is_loaded_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, *, fails: bool
) -> None:
    first = Training(LateDevice(), make=Choosy)
    with Guard(first.state, tmp_path, job="load", socket=None) as guard:
        guard.step(1)
        guard.save(1)
    device = LateDevice()
    again = Training(device, make=Choosy)
    assert isinstance(again.optimizer, Choosy)
    again.optimizer.device, again.optimizer.error, again.optimizer.fails = device, error, fails
    with Guard(again.state, tmp_path, job="load", socket=None) as guard:
        if fails:
            with pytest.raises(StateError, match=r"optimizer: was not put back .*invalid argument"):
                guard.restore()
        else:
            assert guard.restore() == 1
            assert again.expected() == first.expected()
        text = f"the load from registered memory failed, and is made once more from ordinary memory: {error}"
        assert text in [each.message for each in caplog.records]
        assert not device.registered
    assert not device.faults


def test_a_load_finds_its_memory_registered_in_one_piece(tmp_path: Path) -> None:
    """A GPU loads seven times as fast then, and refuses a copy that reaches from one piece into the next.

    So it is the first time, before any state was copied, and when the pieces are those of a save.
    """
    first = Training(LateDevice())
    with Guard(first.state, tmp_path, job="load", socket=None) as guard:
        guard.step(1)
        guard.save(1)
    device = LateDevice()
    again = Training(device)
    with Guard(again.state, tmp_path, job="load", socket=None) as guard:
        assert guard.restore() == 1
        size_bytes = first.state.items().layout.size_bytes
        assert (len(device.registered), max(device.registered.values()) >= size_bytes) == (1, True)
        assert again.expected() == first.expected()
        for pieces in (1, 3):
            snapshot = Snapshot(copier=again.state.copier)
            snapshot.reserve(size_bytes)
            assert all(snapshot.register() for _ in range(pieces))
            assert snapshot.register(whole=True)
            assert not snapshot.register(whole=True)
            assert not snapshot.register()
            assert len(device.registered) == 2
            snapshot.close()
    assert not device.registered
    assert not device.faults


def test_memory_is_unregistered_before_it_grows() -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        first = set(device.registered)
        assert len(first) > 1
        rig.taken()
        rig.snapshot.reserve(rig.snapshot.size_bytes + 1)
        assert not device.registered
        rig.register()
        assert device.registered
        expected, found = rig.expected(), rig.taken()
        assert found() == expected


def test_what_is_on_its_way_arrives_before_the_memory_is_given_back() -> None:
    for _ in range(10):
        rig = Training(LateDevice(slowest_s=0.001))
        rig.register()
        rig.taken()
        rig.end()


def test_a_snapshot_is_taken_again_while_the_last_one_is_on_its_way() -> None:
    with training(LateDevice(slowest_s=0.001)) as rig:
        for _ in range(20):
            rig.taken()
            rig.step()
            expected, found = rig.expected(), rig.taken()
            rig.step()
            assert found() == expected


def test_nothing_is_kept_of_a_copy_that_no_writer_waited_for() -> None:
    """As when the write was given up for a newer state: the tensors, and the copies on the GPU, are let go."""
    for overlap in ("optimizer", "clone"):
        with training(LateDevice(slowest_s=None), overlap) as rig:
            for _ in range(5):
                rig.taken()
                rig.step()
                rig.state.copier.before_update()
            flights = rig.state.copier._late
            until(lambda flights=flights: not (rig.state.copier._forget_what_landed() or rig.state.copier._late))
            assert not any(flight._sources for flight in flights)
            assert rig.state.copier.how.startswith("while training went on")


def test_a_child_of_fork_leaves_the_device_alone(tmp_path: Path) -> None:
    device = LateDevice(slowest_s=None)
    rig = Training(device)
    with Guard(rig.state, tmp_path, job="fork", socket=None, every_s=None) as guard:
        guard.step(2)
        guard.save(2)
        until(lambda: is_registered(guard, device))
        calls = len(device.calls), dict(device.registered)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                rig.optimizer.step()
                guard.close()
                code = int((len(device.calls), device.registered) != calls or bool(device.held_up))
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert device.registered == calls[1]
    assert not device.registered
    assert not device.faults


def is_registered(guard: Guard, device: LateDevice) -> bool:
    snapshots = [held.snapshot for held in guard._checkpointer._held]
    return sum(device.registered.values()) == sum(each.size_bytes or 1 for each in snapshots)


def until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


# --- What a device meets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_the_device_fails_the_copy_and_no_other(*, late: bool) -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        device.breaks_at = device.copies + 5
        with pytest.raises(RuntimeError, match="illegal memory access"):
            rig.taken(late=late)()
        rig.step()


def test_an_error_of_the_device_while_the_optimizer_waits_fails_the_save_alone() -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        found = rig.taken()
        device.breaks_at = device.copies + 1
        rig.step()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            found()
        rig.step()


@pytest.mark.parametrize("free_bytes", [0, 3000, 60_000])
@pytest.mark.parametrize("overlap", copier.OVERLAPS)
def test_a_device_without_room_copies_what_it_has(free_bytes: int, overlap: str) -> None:
    device = LateDevice(slowest_s=None, free_bytes=free_bytes)
    with training(device, overlap) as rig:
        for _ in range(2):
            expected, found = rig.expected(), rig.taken()
            rig.step()
            assert found() == expected
    if overlap == "clone" and free_bytes < 60_000:
        assert rig.state.copier.how.startswith("at once (the GPU has no room for a copy of ")


class Full(LateDevice):
    """Two GPUs; training has taken all of the second one, whose tensors are on "meta"."""

    def room(self, where: Any) -> int:
        return -1 if where.type == "meta" else 2**40


def test_each_gpu_must_have_room_for_a_clone_of_its_own() -> None:
    """Where the first one alone were asked, training would run out of memory on the other."""
    state = TorchState(model=nn.Linear(2, 2), device=Full(), overlap="clone")
    items, copies = state.items(), state.copier
    found = [copies._may_clone(items, torch.device(where)) for where in ("cpu", "meta", "cpu", "meta")]
    assert found == [True, False, True, False]


def test_buffers_are_pinned_where_tensors_are_made_on_a_gpu_unless_said_otherwise() -> None:
    """Also after torch.set_default_device("cuda"): only host memory can be pinned, and without a GPU not even that."""
    why = ""
    with torch.device("meta"):
        try:
            assert CudaDevice().pinned(16).device.type == "cpu"
        except RuntimeError as error:
            why = str(error)
    assert "dense CPU" not in why


@pytest.mark.parametrize("overlap", copier.OVERLAPS)
@pytest.mark.parametrize("registered", [False, True])
def test_what_lies_in_no_single_piece_needs_no_room_on_the_device(overlap: str, *, registered: bool) -> None:
    """Channels last, turned, conjugated, negated, alone or among others: an emergency must not fail for it."""
    values = {
        "channels last": torch.randn(8, 9, 10, 11).to(memory_format=torch.channels_last),
        "flat": torch.randn(3000),
        "turned": torch.randn(60, 41, dtype=torch.float64).t(),
        "strided": torch.randn(50, 200)[:, ::3],
        "conjugated": torch.randn(40, 30, dtype=torch.complex64).conj(),
        "negated": torch.randn(60, 90, dtype=torch.complex64).conj().imag,
    }
    device = LateDevice(slowest_s=None, owns=lambda _: True, free_bytes=0)
    state = TorchState(model=nn.Linear(2, 2), extra={"all": values}, device=device, overlap=overlap)
    with Snapshot(copier=state.copier) as snapshot:
        snapshot.reserve(laid_out(state.items()).size_bytes)
        while registered and snapshot.register():
            pass
        for late in (False, True):
            snapshot.buffer[:] = b"\xaa" * len(snapshot.buffer)
            items = state.items()
            layout = snapshot.take(items, late=late)
            snapshot.wait_arrived(layout.size_bytes)
            found = {
                entry.name: snapshot.buffer[entry.offset : entry.offset + entry.size_bytes] for entry in layout.items
            }
            for item in items:
                if isinstance(item, TensorItem):
                    there = item.tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                    assert bytes(found[item.name]) == bytes(there.numpy()), item.name
    assert not device.faults


def test_training_may_grow_into_the_room_of_a_clone() -> None:
    """Its next copy is of the tensors themselves, which training waits for."""
    device = LateDevice(slowest_s=None)
    with training(device, "clone") as rig:
        expected, found = rig.expected(), rig.taken()
        rig.step()
        assert found() == expected
        device.free_bytes = 1000
        for _ in range(2):
            expected, found = rig.expected(), rig.taken()
            for param in rig.model.parameters():
                param.data.zero_()
            assert found() == expected
            assert rig.state.copier.how == "at once (the GPU has no room any more for a copy of the state)"


def test_a_wait_for_what_never_arrives_can_be_called_off() -> None:
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        layout = rig.snapshot.take(rig.state.items(), late=True)
        device.stuck = True
        off = threading.Event()
        threading.Timer(0.05, off.set).start()
        with pytest.raises(CancelledError):
            rig.snapshot.wait_arrived(layout.size_bytes, off)


# --- With a guard -------------------------------------------------------------------------------------------------


def test_an_error_of_the_device_leaves_the_older_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = LateDevice(slowest_s=None)
    rig = Training(device)
    clock = [100.0]
    with Guard(rig.state, tmp_path, job="late", socket=None, every_s=10.0, clock=lambda: clock[0]) as guard:
        guard.step(1)
        until(lambda: is_registered(guard, device))
        expected = rig.expected()
        guard.save(2)
        for step in (3, 4):
            rig.step()
            clock[0] += 20.0
            device.breaks_at = device.copies + 3 if step == 3 else device.breaks_at
            guard.step(step)
            until(lambda: not guard._writer.busy)
        assert guard.requests.pace.totals.failed == 2
        assert guard.requests.last is not None
        assert guard.requests.last.step == 2
    assert "checkpoint of step 3 failed: RuntimeError: CUDA error: an illegal memory access" in caplog.text
    again = Training(LateDevice(slowest_s=None))
    with Guard(again.state, tmp_path, job="late", socket=None) as guard:
        assert guard.restore() == 2
    found = again.expected()
    assert {name: found[name] for name in expected if name != "torch"} == {
        name: content for name, content in expected.items() if name != "torch"
    }


def test_a_periodic_save_lets_training_go_on_and_an_emergency_does_not(tmp_path: Path) -> None:
    device = LateDevice(slowest_s=None)
    rig = Training(device)
    clock = [100.0]
    with Guard(rig.state, tmp_path, job="late", socket=None, every_s=10.0, clock=lambda: clock[0]) as guard:
        guard.step(1)
        until(lambda: is_registered(guard, device))
        assert set(device.calls) == {"powerguard-writer"}, "memory is never registered in the training thread"
        for step in range(2, 8):
            rig.step()
            clock[0] += 20.0
            device.stuck = True
            guard.step(step)
            device.stuck = False
            rig.step()
            until(lambda: not guard._writer.busy)
            result = guard.stats()
            assert result is not None
            assert (result.step, result.copy.startswith("while training went on")) == (step, True)
        guard.save(8)
        result = guard.stats()
        assert result is not None
        assert result.copy == "at once"
    assert not device.faults


def test_what_cannot_be_registered_is_in_the_figures(tmp_path: Path) -> None:
    device = LateDevice(slowest_s=None, cannot_register="cudaHostRegister: operation not supported")
    rig = Training(device)
    with Guard(rig.state, tmp_path, job="late", socket=None) as guard:
        guard.step(1)
        until(lambda: bool(device.calls))
        guard.save(2)
        result = guard.stats()
        assert result is not None
        assert result.copy == "at once, through buffers: cudaHostRegister: operation not supported"
        assert guard.requests.status().last_save == result


def test_announcing_an_update_without_a_device_does_nothing(tmp_path: Path) -> None:
    state = TorchState(model=nn.Linear(3, 3))
    with Guard(state, tmp_path, job="none", socket=None) as guard:
        guard.before_update()
        guard.save(1)
        result = guard.stats()
        assert result is not None
        assert result.copy == ""


# --- Wrapped ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it compiles
def test_an_optimizer_whose_step_is_compiled() -> None:
    """Whether torch calls the hook or traces past it: every byte is of the boundary, or the copy is refused."""
    device = LateDevice(slowest_s=None)
    with training(device) as rig:
        step = torch.compile(rig.optimizer.step, backend="eager")
        for _ in range(4):
            step()
            expected, found = rig.expected(), rig.taken()
            step()
            with contextlib.suppress(ChangedError):
                assert found() == expected
        assert device.held_up or rig.state.copier.how.startswith("at once")


def test_shards_of_fsdp(tmp_path: Path) -> None:
    """A DTensor counts the changes; its local shard does not."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        device = LateDevice(slowest_s=None)
        model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rig = Training(device)
        rig.model, rig.optimizer = model, optimizer
        rig.average = [param.detach().clone() for param in model.parameters()]
        rig.state = TorchState(model=model, optimizer=optimizer, overlap="optimizer", device=device)
        rig.snapshot = Snapshot(copier=rig.state.copier)
        rig.step()
        rig.register()
        for _ in range(4):
            expected, found = rig.expected(), rig.taken()
            assert rig.state.copier.how.startswith("while training went on")
            rig.step()
            assert found() == expected
        found = rig.taken()
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        with pytest.raises(ChangedError):
            found()
        rig.end()
    finally:
        distributed.destroy_process_group()
