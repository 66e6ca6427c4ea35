"""A state of many tensors is packed as the last time while its structure is the same: never another one than that."""

import contextlib
import copy
import json
import random
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.manifest import Layout
from powerguard.trainer.store.shards import Snapshot, laid_out
from powerguard.trainer.torch import TorchState, copier
from powerguard.trainer.torch.tree import Packer, Rows, StateError, Unpacker
from tests.torch.kept import held, kept
from tests.torch.late_device import LateDevice

MANY = 80


class Job:
    def __init__(self) -> None:
        self.model = nn.ParameterList(nn.Parameter(torch.randn(700 if at % 9 == 0 else 5)) for at in range(MANY))
        average = [param.detach().clone() for param in self.model]
        self.extra: dict[Any, Any] = {
            "rows": {key: torch.randn(3) for key in range(MANY)},
            "nest": {},
            "average": average,
        }
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.1)]
        self.step()

    def step(self, batches: int = 1) -> None:
        for _ in range(batches):
            torch.stack([(param * torch.randn(param.shape)).sum() for param in self.model]).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mine, param in zip(self.extra["average"], self.model, strict=False):
                if mine.shape == param.shape:
                    mine.lerp_(param, 0.1)

    def state(self, overlap: str = "", device: LateDevice | None = None) -> TorchState:
        return TorchState(
            model=self.model, optimizer=self.optimizers, extra=self.extra, random=False, overlap=overlap, device=device
        )


def replaced(job: Job) -> None:
    job.extra["rows"][3] = torch.randn(3)


def reshaped(job: Job) -> None:
    job.extra["rows"][3] = torch.randn(7, 2)


def turned_in_place(job: Job) -> None:
    job.extra["rows"][5] = torch.randn(4, 2)
    job.extra["rows"][5].t_()


def of_another_dtype(job: Job) -> None:
    job.extra["rows"][3] = job.extra["rows"][3].view(torch.int32)


def one_more(job: Job) -> None:
    job.extra["rows"][MANY] = torch.randn(2)


def one_less(job: Job) -> None:
    del job.extra["rows"][7]


def in_another_order(job: Job) -> None:
    job.extra["rows"][0] = job.extra["rows"].pop(0)


def another_key(job: Job) -> None:
    rows = job.extra["rows"]
    named = {f"{key}": value for key, value in rows.items()}
    rows.clear()
    rows.update(named)


def a_value_among_them(job: Job) -> None:
    job.extra["rows"][9] = 9.5


def empty(job: Job) -> None:
    job.extra["rows"][9] = torch.empty(0)


def tied_within(job: Job) -> None:
    job.extra["rows"][9] = job.extra["rows"][11]


def tied_to_the_model(job: Job) -> None:
    job.extra["rows"][9] = job.model[3].data


def tied_to_another_part(job: Job) -> None:
    job.extra["nest"]["same"] = job.extra["rows"][4]


def of_one_name(job: Job) -> None:
    job.extra["nest"].update({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}})


def keys_that_are_equal(job: Job) -> None:
    rows = job.extra["rows"]
    others = {float(key) if type(key) is int else key: value for key, value in rows.items()}
    rows.clear()
    rows.update(others)


def pairs(job: Job) -> None:
    job.extra["nest"]["pairs"] = {(f"{key}", "it"): torch.full((1,), float(key)) for key in range(MANY)}


def pairs_to_dicts(job: Job) -> None:
    job.extra["nest"]["pairs"] = {
        first: {second: value} for (first, second), value in job.extra["nest"]["pairs"].items()
    }


def moments_gone(job: Job) -> None:
    job.optimizers[0].state.pop(job.model[2])


def moments_swapped(job: Job) -> None:
    state = job.optimizers[0].state[job.model[9]]
    state["exp_avg"] = torch.randn_like(state["exp_avg"])


def data_swapped(job: Job) -> None:
    job.model[9].data = torch.randn(700)


def another_parameter(job: Job) -> None:
    """No optimizer has it, and its gradient changes nothing."""
    job.optimizers[0].state.pop(job.model[18], None)  # it trains the one before no more
    job.model[18] = nn.Parameter(torch.randn(700))


def one_more_group(job: Job) -> None:
    job.model.append(nn.Parameter(torch.randn(700)))
    job.optimizers[-1].add_param_group({"params": [job.model[-1]]})


def one_more_average(job: Job) -> None:
    job.extra["average"].append(torch.randn(5))


def one_average_less(job: Job) -> None:
    job.extra["average"].pop()


CHANGES: list[Callable[[Job], None]] = [
    *(replaced, reshaped, turned_in_place, of_another_dtype, one_more, one_less, in_another_order, another_key),
    *(keys_that_are_equal, pairs),
    *(a_value_among_them, empty, tied_within, tied_to_the_model, tied_to_another_part, of_one_name, moments_gone),
    *(moments_swapped, data_swapped, another_parameter, one_more_group, one_more_average, one_average_less),
]


def same(state: TorchState, job: Job) -> None:
    """What the state keeps is what one keeps that has never kept anything."""
    mine, fresh = kept(state.items()), kept(job.state().items())
    assert list(mine) == list(fresh)
    alike(mine, fresh)


def alike(mine: Mapping[str, Loaded], fresh: Mapping[str, Loaded]) -> None:
    assert mine.keys() == fresh.keys()
    for name, loaded in fresh.items():
        found = mine[name]
        assert (found.dtype, found.shape, bytes(found.data)) == (loaded.dtype, loaded.shape, bytes(loaded.data)), name


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: Callable[[Job], None]) -> None:
    job = Job()
    state = job.state()
    for _ in range(2):
        same(state, job)
    job.step()
    same(state, job)
    change(job)
    for _ in range(2):
        same(state, job)


def test_pairs_are_not_taken_for_dicts() -> None:
    job = Job()
    state = job.state()
    for change in (pairs, pairs_to_dicts):
        change(job)
        same(state, job)


class Copies:
    """Takes the states of a job from a device that copies late, into one or two snapshots in turn."""

    def __init__(self, job: Job, overlap: str, seed: int) -> None:
        self._job = job
        self.device = LateDevice(seed=seed, slowest_s=None if seed % 2 else 0.002, owns=lambda _: chance.random() < 0.9)
        chance = random.Random(seed)
        self.state = job.state(overlap, self.device)
        self._snapshots = [Snapshot(copier=self.state.copier) for _ in range(1 + seed % 2)]
        self._found: dict[Snapshot, tuple[Layout, Mapping[str, Loaded]]] = {}
        self.was_late = False

    def take(self, *, late: bool) -> None:
        """Into the snapshot that was taken into the longest ago; what was on its way there is given up."""
        snapshot = self._snapshots.pop(0)
        self._snapshots.append(snapshot)
        expected, items = kept(self._job.state().items()), self.state.items()
        snapshot.reserve(laid_out(items).size_bytes)
        while snapshot.register():
            pass
        self._found[snapshot] = snapshot.take(items, late=late), expected
        self.was_late = self.was_late or self.state.copier.how.startswith("while training went on")

    def look(self) -> None:
        for snapshot, (layout, expected) in self._found.items():
            snapshot.wait_arrived(layout.size_bytes)
            alike(held(snapshot, layout), expected)

    def end(self) -> None:
        for snapshot in self._snapshots:
            snapshot.close()
        assert not self.device.registered
        assert not self.device.faults


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("overlap", copier.OVERLAPS)
def test_changes_in_any_order(seed: int, overlap: str) -> None:
    """Also while copies are on their way, with an emergency in the midst of them, and with one more optimizer later."""
    chance = random.Random(seed)
    job = Job()
    copies = Copies(job, overlap, seed)
    for turn in range(24):
        if turn == 12:
            copies.end()
            one_more_group(job)
            job.optimizers.append(torch.optim.SGD([job.model[-1]], lr=0.1, momentum=0.9))
            copies = Copies(job, overlap, seed + 1)
        for _ in range(chance.choice([0, 0, 1])):
            with contextlib.suppress(KeyError):
                chance.choice(CHANGES)(job)
        copies.take(late=chance.random() < 0.8)
        with contextlib.suppress(KeyError):
            chance.choice(CHANGES)(job)
        if chance.random() < 0.2:
            copies.take(late=False)
        job.step(chance.choice([1, 1, 3]))
        if chance.random() < 0.5:
            copies.look()
    copies.look()
    copies.end()
    assert copies.was_late == bool(overlap)


def back(packer: Packer, tree: object) -> Any:
    node = packer.pack("it", tree)
    return Unpacker(kept(packer.items)).unpack("it", json.loads(packer.text(node)))


@pytest.mark.parametrize("seed", range(2))
def test_what_comes_back_is_the_state_of_that_moment(seed: int) -> None:
    """Random states, random changes, against a deep copy: values, kinds of keys, signs, and which tensors are one."""
    chance = random.Random(seed)
    numbers = torch.randn(8, dtype=torch.complex64)
    rows: dict[Any, Any] = {key: torch.randn(3) for key in range(64)}
    tree: dict[Any, Any] = {"before": {}, "rows": rows, "nested": {key: {"a": torch.randn(2)} for key in range(64)}}
    known: dict[str, Rows] = {}

    def key() -> Any:
        at = chance.randrange(70)
        return chance.choice([at, float(at), str(at), bool(at % 2), (str(at), "a")])

    def tensor() -> Any:
        there = [each for each in rows.values() if isinstance(each, torch.Tensor)]
        fresh = torch.randn(chance.randrange(4), chance.randrange(1, 4))
        part = numbers[:]
        made = [fresh, fresh.t(), fresh.half(), fresh.expand(2, *fresh.shape), nn.Parameter(fresh)]
        return chance.choice([*made, chance.choice(there), part.imag, part.conj().imag, part, part.conj()])

    for _ in range(100):
        match chance.randrange(8):
            case 0:
                rows[key()] = tensor()
            case 1:
                del rows[chance.choice(list(rows))]
            case 2:
                old = chance.choice(list(rows))
                rows[key()] = rows.pop(old)
            case 3:
                tree["nested"][key()] = chance.choice(
                    [{"a": tensor()}, {"a": tensor(), "b": tensor()}, {}, tensor(), 1]
                )
            case 4:
                tree["nested"].pop(chance.choice(list(tree["nested"])))
            case 5:
                tree["before"] = chance.choice([{}, {"a": tensor()}, {"b/c": tensor(), "b": {"c": tensor()}}])
            case 6:
                rows[chance.choice(list(rows))].data = torch.randn(3)
            case _:
                numbers.mul_(1j)
        rows.update({f"more {at}": torch.randn(3) for at in range(66 - len(rows))})
        for _ in range(2):
            assert as_text(back(Packer(known), tree)) == as_text(copy.deepcopy(tree)) == as_text(tree)


def as_text(tree: Any, first: dict[int, int] | None = None) -> str:
    """All of a tree in one text; a tensor that comes again is the number of the first."""
    first = {} if first is None else first
    if isinstance(tree, dict):
        return "; ".join(f"{key!r}: [{as_text(part, first)}]" for key, part in tree.items())
    if not isinstance(tree, torch.Tensor):
        return repr(tree)
    plain = tree.detach().resolve_conj().resolve_neg().contiguous()
    return f"{tree.dtype} {tuple(tree.shape)} {plain.view(-1).view(torch.uint8).tolist()}"


def test_a_tensor_that_cannot_be_kept_is_named() -> None:
    rows = {key: torch.ones(2) for key in range(MANY)}
    with pytest.raises(StateError, match="it/3"):
        Packer({}).pack("it", {**rows, 3: torch.eye(2).to_sparse()})


def test_a_plan_that_was_interrupted_is_made_again() -> None:
    """Ctrl-C in the middle of a plan, and the next state is as the one before: it went into another's order."""
    job = Job()
    state = job.state()
    same(state, job)
    rows = job.extra["rows"]
    before = dict(rows)
    rows.update({key: torch.zeros(2, dtype=torch.int64) for key in range(MANY // 2)})

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is copier.laid_out.__code__:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            state.items()
    finally:
        sys.setprofile(None)
    rows.update(before)
    same(state, job)


def test_a_text_in_the_state_is_never_taken_for_rows() -> None:
    packer = Packer({})
    node = packer.pack("it", {"rows": {key: torch.ones(1) for key in range(MANY)}, "text": "\0 / 0"})
    token = next(iter(packer.texts))
    assert packer.text({"text": node["text"], "rows": node["rows"]}).count(token) == 0
    index = json.loads(packer.text(node))
    assert index["text"] == "\0 / 0"
    assert len(Unpacker(kept(packer.items)).unpack("it", index)["rows"]) == MANY
