"""What tests/torch/test_copier.py proves with a device that copies late, on a GPU; and the rates, which -s shows."""

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from powerguard.trainer import Guard
from powerguard.trainer.store.shards import Snapshot, laid_out
from powerguard.trainer.torch import TorchState
from powerguard.trainer.torch.copier import OVERLAPS, ChangedError
from powerguard.trainer.torch.device import CudaDevice, DeviceError
from tests.torch.copied import OPTIMIZERS, Training, training
from tests.torch.kept import from_device, kept
from tests.torch.test_late_kills import killed

WIDTH = 200_000  # 20 MB a matrix, 120 MB of state
GB = 1e9


class Refusing(CudaDevice):
    """A GPU with which no memory can be registered."""

    def register(self, where: object, address: int, size_bytes: int) -> None:
        msg = "cudaHostRegister: operation not supported"
        raise DeviceError(msg)


class Careless(CudaDevice):
    """Orders nothing."""

    def hold_up(self, mark: object) -> None:
        pass


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("batches", [1, 3])
def test_training_goes_on_and_every_byte_is_of_the_boundary(make: str, overlap: str, batches: int) -> None:
    options = {"make": OPTIMIZERS[make], "batches": batches, "width": WIDTH, "where": "cuda"}
    with training(CudaDevice(), overlap, **options) as rig:
        for _ in range(6):
            expected, found = rig.expected(), rig.taken()
            assert rig.state.copier.how.startswith("while training went on" if overlap else "at once")
            rig.step()
            assert found() == expected
            rig.step()


def test_a_wait_that_is_missing_is_found() -> None:
    with training(Careless(), "optimizer", make=OPTIMIZERS["adamw fused"], width=10 * WIDTH, where="cuda") as rig:
        differ = 0
        for _ in range(5):
            expected, found = rig.expected(), rig.taken()
            for _ in range(5):
                rig.optimizer.step()
            differ += found() != expected
        assert differ


def test_a_change_that_no_optimizer_announced_is_refused() -> None:
    with training(CudaDevice(), "optimizer", width=WIDTH, where="cuda") as rig:
        found = rig.taken()
        with torch.no_grad():
            rig.model[3].weight.mul_(2.0)
        rig.step()
        with pytest.raises(ChangedError):
            found()


def test_a_state_larger_than_a_piece_of_registered_memory_is_loaded(tmp_path: Path) -> None:
    """In a new process, and where pieces were registered for saves: CUDA refuses a copy from one into the next."""
    rig = Training(CudaDevice(), width=5 * WIDTH, where="cuda")
    with Guard(rig.state, tmp_path, job="large", socket=None, every_s=None) as guard:
        guard.step(1)
        guard.save(1)
        expected = rig.expected()
        until_s = time.monotonic() + 5.0  # the snapshots are registered meanwhile, in pieces
        while time.monotonic() < until_s:
            rig.step()
            guard.step(1)
        assert guard.restore() == 1
        assert rig.expected() == expected
    again = Training(CudaDevice(), width=5 * WIDTH, where="cuda")
    with Guard(again.state, tmp_path, job="large", socket=None, every_s=None) as guard:
        for _ in range(2):
            assert guard.restore() == 1
            assert again.expected() == expected
            until_s = time.monotonic() + 2.0  # the snapshots are made ready for the next save
            while time.monotonic() < until_s:
                again.step()
                guard.step(1)


def test_a_checkpoint_of_a_gpu_that_is_not_here_is_put_on_this_one() -> None:
    """Device numbers change when a GPU is taken out, or when a job is given others."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    average = torch.randn(7, device="cuda")
    state = TorchState(model=model, optimizer=optimizer, extra={"run": {"average": average}})
    items, _ = from_device(kept(state.items()), "cuda:63", ("model", "optimizer", "extra.run"), generators=0)
    again, run = nn.Linear(64, 64).cuda(), {"average": torch.zeros(7)}
    other = torch.optim.AdamW(again.parameters(), fused=True)
    TorchState(model=again, optimizer=other, extra={"run": run}).load(items)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(run["average"], average)
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    other.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_model_in_channels_last_goes_on_with_the_same_bits(make: str) -> None:
    """A fused optimizer refuses moments that lie in another order than their parameter."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(16, 32, 3, device="cuda").to(memory_format=torch.channels_last)
        return model, OPTIMIZERS[make](model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = param.detach().square()
        optimizer.step()

    model, optimizer = made()
    train(model, optimizer)
    saved = kept(TorchState(model=model, optimizer=optimizer).items())
    train(model, optimizer)
    again, other = made()
    TorchState(model=again, optimizer=other).load(saved)
    train(again, other)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)


def test_memory_that_cannot_be_registered_goes_through_buffers() -> None:
    with training(Refusing(), "optimizer", width=WIDTH, where="cuda") as rig:
        expected, found = rig.expected(), rig.taken()
        rig.step()
        assert found() == expected
        assert "through buffers: cudaHostRegister: operation not supported" in rig.state.copier.how


def test_a_call_that_the_gpu_refuses_leaves_no_error_for_training() -> None:
    """torch would raise it at the next launch of this thread, in the middle of a load."""
    device, memory = CudaDevice(), torch.zeros(1 << 20, dtype=torch.uint8)
    where = torch.device("cuda", torch.cuda.current_device())
    device.register(where, memory.data_ptr(), len(memory))
    with pytest.raises(DeviceError, match="cudaHostRegister"):
        device.register(where, memory.data_ptr(), len(memory))
    assert torch.ones(4, device=where).add_(1).sum().item() == 8
    device.unregister(where, memory.data_ptr())
    with pytest.raises(DeviceError, match="cudaHostUnregister"):
        device.unregister(where, memory.data_ptr())
    assert torch.ones(4, device=where).add_(1).sum().item() == 8


def test_a_step_that_is_recorded_in_a_graph_is_never_overlapped() -> None:
    model = nn.Linear(2000, 2000, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    state = TorchState(model=model, optimizer=optimizer, overlap="optimizer")
    graph = torch.cuda.CUDAGraph()
    optimizer.step()
    with torch.cuda.graph(graph):
        optimizer.step()
    with Snapshot(copier=state.copier) as snapshot:
        register(snapshot, state)
        layout = snapshot.take(state.items(), late=True)
        assert state.copier.how.startswith("at once (an optimizer's step was recorded in a CUDA graph")
        expected = bytes(snapshot.buffer[: layout.size_bytes])
        graph.replay()
        torch.cuda.synchronize()
        assert bytes(snapshot.buffer[: layout.size_bytes]) == expected


def test_a_clone_for_which_the_gpu_has_no_room_is_not_made() -> None:
    with training(CudaDevice(), "clone", width=WIDTH, where="cuda") as rig:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free - CudaDevice.sizes.spare, dtype=torch.uint8, device="cuda")
        expected, found = rig.expected(), rig.taken()
        assert rig.state.copier.how.startswith("at once (the GPU has no room for a copy of")
        del filler
        torch.cuda.empty_cache()
        rig.step()
        assert found() == expected


@pytest.mark.parametrize("how", ["its peak is forgotten", "its cache is emptied"])
def test_what_training_needs_again_is_no_room_for_a_clone(how: str) -> None:
    """Many loops do one of these at each step. Training would run out of memory while the clone is copied."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    step = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    del step
    if how == "its cache is emptied":
        torch.cuda.empty_cache()
    else:
        torch.cuda.reset_peak_memory_stats()
    assert CudaDevice().room(torch.device("cuda", torch.cuda.current_device())) < free - (3 << 30)


def broken(folder: Path, pipe: Connection) -> None:
    """Meet an error of the GPU between two checkpoints; the process cannot use its GPU any more."""
    rig = Training(CudaDevice(), width=WIDTH, where="cuda")
    guard = Guard(rig.state, folder, job="broken", socket=None, every_s=None)
    guard.step(1)
    guard.save(1)
    until_s = time.monotonic() + 5.0  # the snapshots are registered meanwhile
    while time.monotonic() < until_s:
        guard.step(1)
    _ = torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    try:
        guard.save(2)
    except Exception as error:  # noqa: BLE001 - what training sees
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("saved")


def test_an_error_of_the_gpu_reaches_training_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    context = get_context("spawn")
    receiver, ours = context.Pipe(duplex=False)
    child = context.Process(target=broken, args=(tmp_path, ours))
    child.start()
    ours.close()
    text = receiver.recv()
    child.join(60)
    assert "device-side assert" in text, text
    again = Training(CudaDevice(), width=WIDTH, where="cuda")
    with Guard(again.state, tmp_path, job="broken", socket=None) as guard:
        assert guard.restore() == 1


def test_a_child_of_fork_leaves_the_gpu_alone(tmp_path: Path) -> None:
    rig = Training(CudaDevice(), width=WIDTH, where="cuda")
    with Guard(rig.state, tmp_path, job="fork", socket=None, every_s=None) as guard:
        guard.step(1)
        guard.save(1)
        child = os.fork()
        if not child:
            guard.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rig.step()
        guard.save(2)
    again = Training(CudaDevice(), width=WIDTH, where="cuda")
    with Guard(again.state, tmp_path, job="fork", socket=None) as guard:
        assert guard.restore() == 2
    for mine, other in zip(again.model.state_dict().values(), rig.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_kills_while_copies_are_late_change_no_bit(tmp_path: Path) -> None:
    killed(tmp_path, 12, 1500, "cuda")


# --- Rates --------------------------------------------------------------------------------------------------------


def register(snapshot: Snapshot, state: TorchState) -> None:
    snapshot.reserve(laid_out(state.items()).size_bytes)
    while snapshot.register():
        pass


def best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def test_a_copy_reaches_the_bus_with_one_thread_too() -> None:
    """As fast as one copy into pinned memory, less a seventh; 8 GB in 200 tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [torch.randn(10_000_000, device="cuda") for _ in range(200)]
        whole = torch.empty(8 * 10**9, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(8 * 10**9, dtype=torch.uint8, pin_memory=True)
        bus_s = best(lambda: pinned.copy_(whole))
        state = TorchState(model=nn.Linear(1, 1), extra={"rows": rows})
        with Snapshot(copier=state.copier) as snapshot:
            register(snapshot, state)
            take_s = best(lambda: snapshot.take(state.items()))
            print(f"bus {8 / bus_s:.1f} GB/s, snapshot {8 / take_s:.1f} GB/s")
            assert take_s < bus_s / 0.86
    finally:
        torch.set_num_threads(threads)


def test_training_stands_for_next_to_nothing_with_overlap() -> None:
    """2 GB: a copy at once takes 0.04 s at 50 GB/s."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = TorchState(model=model, optimizer=optimizer, overlap="optimizer")
    with Snapshot(copier=state.copier) as snapshot:
        stands = []
        for turn in range(6):
            model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            if not turn:
                register(snapshot, state)
            began_s = time.perf_counter()
            layout = snapshot.take(state.items(), late=True)
            stands.append(time.perf_counter() - began_s)
            snapshot.wait_arrived(layout.size_bytes)
        print(f"stands {1000 * min(stands):.1f} ms for {layout.size_bytes / GB:.1f} GB ({state.copier.how})")
        assert min(stands) < 0.02


def test_many_small_tensors() -> None:
    """40,000 of 50 kB, 2 GB: 4.5 to 5.6 s one by one, on an H100."""
    rows = {key: torch.randn(12_500, device="cuda") for key in range(40_000)}
    state = TorchState(model=nn.Linear(1, 1), extra={"rows": rows})
    with Snapshot(copier=state.copier) as snapshot:
        register(snapshot, state)
        take_s = best(lambda: snapshot.take(state.items()))
    print(f"40,000 tensors: {take_s:.3f} s")
    assert take_s < 0.5
