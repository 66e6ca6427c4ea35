"""The whole state of a PyTorch training as a `State`: what the next step depends on, so that it goes on bit for bit.

    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    guard = Guard(state, "/nvme/llm", job="llm")

Each rank keeps its own: of DDP that is a full copy, of FSDP2 (`fully_shard`) the local shards, which need the same
number of ranks again (torch.distributed.checkpoint reshards, see `powerguard.trainer.dcp`). A step boundary is after
`optimizer.step()` (and `scheduler.step()`): gradients are not kept, so never checkpoint between two micro-batches.

What all ranks of a DDP job hold alike, divided among them: each keeps its share, and gets the rest from the others.

Eight ranks on one host would else write the same parameters and moments eight times, and an emergency would take eight
times as long. Only loading needs a collective; saving needs none, since every rank finds the same division by itself.
"""

import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from powerguard.trainer.store.items import JSON, Buffer, Item, Loaded
from powerguard.trainer.torch.copier import OVERLAPS, Copier
from powerguard.trainer.torch.data import ResumableLoader, ResumableSampler
from powerguard.trainer.torch.ddp import settle_buckets, warn_of_unwrapped
from powerguard.trainer.torch.device import CudaDevice, Device
from powerguard.trainer.torch.tree import (
    Json,
    Packer,
    Rows,
    Sharded,
    StateError,
    Tensor,
    Unpacker,
    Value,
    has_other_rows,
    layout_of,
    local,
)
from powerguard.trainer.weights import FORMAT, INDEX

_log = logging.getLogger("powerguard.trainer")
_INDEX_BYTES: Final = 4096
"""The index is filled up to a multiple of this with spaces: a number with one more digit moves nothing behind it."""

_SMALL_BYTES: Final = 4096  # not worth a message: every rank keeps these
_PIECE_BYTES: Final = 256 << 20


class Division:
    """The ranks of the default process group, which must be there. Raises StateError without one."""

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            msg = "divide=True: torch.distributed is not initialised: call init_process_group first"
            raise StateError(msg)
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        # NCCL alone moves only what lies on a GPU.
        self._device = torch.device("cuda" if "gloo" not in str(dist.get_backend()) else "cpu")
        self._structure: Sequence[Any] = ()
        self._mine: list[int] = []
        self._told = ""

    def check_alike(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise StateError, on every rank, unless all of them hold the same bits. A collective."""
        seen = sha256()
        for name, tensor in tensors:
            count = int(tensor.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
            seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {count}\n".encode())
        told: list[Any] = [None] * self._ranks
        dist.all_gather_object(told, seen.hexdigest())
        if len(set(told)) != 1:
            msg = "divide=True: the ranks hold different parameters (make the state after DDP has wrapped the model)"
            raise StateError(msg)

    def share(
        self, items: Sequence[Item], structure: Sequence[Any], alike: Callable[[], Sequence[Callable[[str], bool]]]
    ) -> tuple[list[Item], str]:
        """What this rank keeps of these items, and who keeps what, as JSON: as the last time for an equal structure.

        alike: returns which items all ranks have, by name.
        """
        if structure != self._structure or not structure:
            self._structure = ()  # until it is divided: as in `Copier.arranged`
            self._divide(items, alike())
            self._structure = structure
        return [items[number] for number in self._mine], self._told

    def _divide(self, items: Sequence[Item], alike: Sequence[Callable[[str], bool]]) -> None:
        loads = [0] * self._ranks
        owners: dict[str, int] = {}
        large = [item for item in items if item.size_bytes >= _SMALL_BYTES]
        divided = [item for item in large if any(is_alike(item.name) for is_alike in alike)]
        for item in sorted(divided, key=lambda each: (-each.size_bytes, each.name)):
            owner = loads.index(min(loads))
            loads[owner] += item.size_bytes
            owners[item.name] = owner
        self._mine = [at for at, item in enumerate(items) if owners.get(item.name, self._rank) == self._rank]
        told = [[item.name, owners[item.name], item.dtype, list(item.shape), item.size_bytes] for item in divided]
        self._told = json.dumps({"ranks": self._ranks, "items": told}, separators=(",", ":"))

    def complete(self, items: Mapping[str, Loaded], told: Json) -> Mapping[str, Loaded]:
        """All items, those of the other ranks too. A collective: each rank sends its share to all."""
        if told["ranks"] != self._ranks:
            msg = f"the checkpoint is divided among {told['ranks']} ranks, here are {self._ranks}"
            raise StateError(msg)
        whole = dict(items)
        for name, owner, dtype, shape, size_bytes in told["items"]:
            memory = bytearray(items[name].data) if owner == self._rank else bytearray(size_bytes)
            self._tell(torch.frombuffer(memory, dtype=torch.uint8), owner)
            whole[name] = Loaded(name, dtype, tuple(shape), memoryview(memory))
        return whole

    def _tell(self, buffer: Tensor, owner: int) -> None:
        for start in range(0, buffer.numel(), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            moved = piece.to(self._device)
            dist.broadcast(moved, src=owner)
            if moved is not piece:
                piece.copy_(moved)


Module = Any
Optimizer = Any
"""Those of torch."""

_TOLD: Final = 5
_MANY: Final = 1000


class Component(Protocol):
    """How one part of the state is taken out and put back."""

    def tree(self) -> object:
        """What there is to keep, as dicts, lists, plain values and tensors."""
        ...

    def alike(self, name: str) -> Callable[[str], bool]:
        """Which of its items all ranks of a DDP job hold alike, by name."""
        ...

    def check(self, name: str, node: Json, source: Unpacker) -> list[str]:
        """Say what does not fit, before anything is touched."""
        ...

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        """Put it back."""
        ...


class TorchState:
    """Everything that the next training step depends on. A `powerguard.trainer.store.items.State`.

    model: module, or several as a list or a mapping; DDP and torch.compile are looked through, so that a job may be
        started with or without them. Parameters and all buffers are kept, those that are not persistent too. Give the
        module that DDP returned: from three ranks on DDP has its final buckets before the first step then (see
        `powerguard.trainer.torch.ddp`), and making the state is a collective.
    optimizer, scheduler, scaler, sampler, dataloader: one or several of whatever has `state_dict()` and
        `load_state_dict()`. A loader that has not needs a `ResumableSampler`.
    ema: a module, or anything `extra` takes.
    extra: by name, what else the training depends on: modules, what has a state_dict, torch.Generator, numpy
        Generator, or dicts and lists of plain values and tensors, which are filled again in place.
    divide: for plain DDP: parameters and moments, which all ranks hold alike, are divided among them. Each keeps its
        share and gets the rest from the others at `restore`. Make the state after DDP has wrapped the model.
    overlap: what a periodic save copies while training goes on. "": nothing. "optimizer": large parameters and moments
        on a GPU; each optimizer's next step is ordered behind their copy. What else changes them must call
        `Guard.before_update` first. "clone": all on a GPU, from a copy there, where that has room.
    random: keep the states of all global random number generators: torch on the CPU and on every GPU, numpy, Python.

    Raises StateError for what cannot be kept at all; `items` raises it for a value deep inside, naming its key.
    """

    def __init__(
        self,
        *,
        model: object,
        optimizer: object = None,
        scheduler: object = None,
        scaler: object = None,
        sampler: object = None,
        dataloader: object = None,
        ema: object = None,
        extra: Mapping[str, object] | None = None,
        divide: bool = False,
        overlap: str = "",
        random: bool = True,
        device: Device | None = None,
    ) -> None:
        if overlap not in OVERLAPS:
            msg = f"overlap={overlap!r}: must be one of {', '.join(map(repr, OVERLAPS))}"
            raise StateError(msg)
        given = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "sampler": sampler,
            "dataloader": dataloader,
        }
        self._components: dict[str, Component] = {}
        self._kinds: dict[str, str] = {}
        for word, thing in given.items():
            for name, part in _each(word, thing):
                self._components[name] = _component(name, part)
                if word in ("optimizer", "scheduler"):
                    self._kinds[name] = _kind(word, part)
        if ema is not None:
            self._components["ema"] = _component("ema", ema)
        for name, part in (extra or {}).items():
            self._components[f"extra.{name}"] = _component(f"extra.{name}", part)
        if random:
            self._components["random"] = RandomStates()
        modules = [part for _, part in _each("model", model) if isinstance(part, torch.nn.Module)]
        settle_buckets(modules)
        warn_of_unwrapped(modules)
        self._division = self._divided() if divide else None
        self._known: dict[str, Rows] = {}
        optimizers = [inner(part) for _, part in _each("optimizer", optimizer)] if overlap == "optimizer" else []
        self.copier = Copier(device or CudaDevice(), overlap, optimizers)
        self.copier.meet(param for module in modules for param in module.parameters())

    def _divided(self) -> "Division":

        division = Division()
        modules = [component.module for component in self._components.values() if isinstance(component, _Module)]
        named = [pair for module in modules for pair in module.named_parameters()]
        if any(layout_of(param) is not None for _, param in named):
            msg = "divide=True is for DDP: the parameters of this model are divided among the ranks already"
            raise StateError(msg)
        division.check_alike(named)
        return division

    def items(self) -> Iterable[Item]:
        """One item for each tensor, live, and one of JSON. Raises StateError naming the key that cannot be kept."""
        packer = Packer(self._known)
        parts = {name: packer.pack(name, component.tree()) for name, component in self._components.items()}
        index: dict[str, Json] = {"format": FORMAT, "parts": parts, "kinds": self._kinds}
        items, structure = packer.items, packer.structure
        if self._division is not None:
            items, told = self._division.share(items, structure, self._alike)
            index["divided"] = packer.stand_in(told)
        text = packer.text(index).encode()
        text += b" " * (-len(text) % _INDEX_BYTES)
        return self.copier.arranged([Buffer(INDEX, text, JSON, ()), *items], [len(text), *structure])

    def _alike(self) -> list[Callable[[str], bool]]:
        return [component.alike(name) for name, component in self._components.items()]

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Put everything back, or, where something does not fit, touch nothing and raise StateError."""
        try:
            index = items[INDEX].value() if INDEX in items else None
        except (ValueError, RecursionError):
            index = None
        if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("parts"), dict):
            msg = "the checkpoint was not written by TorchState, or by a newer one"
            raise StateError(msg)
        parts: dict[str, Json] = index["parts"]
        slips = [f"{name} is in the checkpoint and not given" for name in parts if name not in self._components]
        slips += [f"{name} is given and not in the checkpoint" for name in self._components if name not in parts]
        slips += self._other_kinds(index.get("kinds", {}))
        source = Unpacker(self._whole(items, index))
        for name, component in self._components.items():
            if name in parts:
                try:
                    slips += component.check(name, parts[name], source)
                except (KeyError, TypeError, AttributeError) as error:
                    msg = f"{name}: the checkpoint does not hold together ({type(error).__name__}: {error})"
                    raise StateError(msg) from error
        if slips:
            more = f"; and {len(slips) - _TOLD} more" if len(slips) > _TOLD else ""
            msg = f"the checkpoint does not fit this training: {'; '.join(slips[:_TOLD])}{more}"
            raise StateError(msg)
        self.copier.before_update()
        try:
            self._put_back(parts, source)
        except (RuntimeError, StateError) as error:  # what a GPU refuses deep in a state is a StateError
            if not self.copier.unregister_loaded():
                raise
            _log.warning(
                "the load from registered memory failed, and is made once more from ordinary memory: %s", error
            )
            self._put_back(parts, source)

    def _put_back(self, parts: Mapping[str, Json], source: Unpacker) -> None:
        for name, component in self._components.items():  # random numbers come last: loading the others may draw some
            component.load(name, parts[name], source)

    def _other_kinds(self, kinds: Mapping[str, Json]) -> Iterable[str]:
        """Name each optimizer and schedule of another class: most would be loaded, and fail at the next step."""
        for name, mine in self._kinds.items():
            if (kept := kinds.get(name, mine)) != mine:
                yield f"{name} is {kept} in the checkpoint, {mine} here (make it with {kept})"

    def _whole(self, items: Mapping[str, Loaded], index: Mapping[str, Json]) -> Mapping[str, Loaded]:
        """What this rank keeps, and what the others keep for it."""
        if ("divided" in index) != (self._division is not None):
            msg = f"the checkpoint was written with divide={'divided' in index}; load it with the same"
            raise StateError(msg)
        return items if self._division is None else self._division.complete(items, index["divided"])


def _each(word: str, thing: object) -> Iterable[tuple[str, object]]:
    """Name one thing or several."""
    if thing is None:
        return []
    if isinstance(thing, Mapping):
        return [(f"{word}.{key}", part) for key, part in thing.items()]
    if isinstance(thing, Sequence):
        return [(f"{word}.{at}", part) for at, part in enumerate(thing)]
    return [(word, thing)]


def _kind(word: str, thing: object) -> str:
    """Name the class of an optimizer or a schedule."""
    return type(inner(thing, word)).__name__


def inner(thing: Value, word: str = "optimizer") -> Value:
    """Look through Accelerate's wrapper."""
    is_wrapped = type(thing).__name__ in ("AcceleratedOptimizer", "AcceleratedScheduler")
    return getattr(thing, word) if is_wrapped else thing


def _component(name: str, thing: object) -> Component:
    if isinstance(thing, torch.nn.Module):
        return _Module(name, unwrapped(thing))
    if isinstance(thing, torch.optim.Optimizer):
        return _Optimizer(thing)
    if isinstance(thing, torch.Generator):
        return _TorchGenerator(thing)
    if hasattr(thing, "bit_generator"):
        return _NumpyGenerator(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Stateful(thing)
    if isinstance(thing, MutableMapping | MutableSequence):
        return _Plain(thing)
    msg = f"{name}: a {type(thing).__qualname__} has no state_dict() and load_state_dict(), and is not a dict or list"
    if hasattr(thing, "batch_sampler") and hasattr(thing, "dataset"):
        msg += " (powerguard.trainer.torch.data.ResumableLoader, or torchdata's StatefulDataLoader, keeps its position)"
    raise StateError(msg)


def unwrapped(module: Module) -> Module:
    """Look through DDP, DataParallel and torch.compile. Raises StateError for FSDP1."""
    while True:
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "DataParallel"):
            module = module.module
        elif kind == "OptimizedModule":
            module = module._orig_mod  # noqa: SLF001 - torch documents no other way
        elif kind == "FullyShardedDataParallel":
            msg = "FullyShardedDataParallel (FSDP1) hides its shards: use FSDP2 (torch.distributed.fsdp.fully_shard)"
            raise StateError(msg)
        else:
            return module


# --- Modules ------------------------------------------------------------------------------------------------------


class _Module:
    """Loaded in place, tensor by tensor: no second copy of the model is ever in memory."""

    def __init__(self, name: str, module: Module) -> None:
        self.module = module
        self._name = name

    def _refuse_lazy(self) -> None:
        for key, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                msg = f"{self._name}/{key} has no shape yet (run the model once before restore() and the first step)"
                raise StateError(msg)

    def tree(self) -> object:
        self._refuse_lazy()
        state = self.module.state_dict(keep_vars=False)
        return {
            "state": dict(state),
            "buffers": {name: buffer for name, (_, _, buffer) in self._passing(state).items()},
        }

    def _passing(self, state: Mapping[str, object]) -> dict[str, tuple[Any, str, Any]]:
        """Buffers that no state_dict has (persistent=False): owner, name in it, buffer."""
        found: dict[str, tuple[Any, str, Any]] = {}
        for prefix, owner in self.module.named_modules():
            for leaf, buffer in owner._buffers.items():  # noqa: SLF001 - named_buffers() does not give the owner
                name = f"{prefix}.{leaf}" if prefix else leaf
                if buffer is not None and name not in state:
                    found[name] = (owner, leaf, buffer)
        return found

    def alike(self, name: str) -> Callable[[str], bool]:
        params = {f"{name}/state/{param}" for param, _ in self.module.named_parameters()}
        return params.__contains__  # buffers are not: each rank has the running statistics of its own data

    def check(self, name: str, node: Json, source: Unpacker) -> list[str]:
        self._refuse_lazy()
        here = self.module.state_dict()
        there = source.pairs(node["state"])
        slips = [f"{name}/{key} is in the checkpoint and not in the model" for key in there if key not in here]
        slips += [f"{name}/{key} is in the model and not in the checkpoint" for key in here if key not in there]
        for key, tensor in self._in_place(here).items():
            if key in there:
                slips += _misfit(f"{name}/{key}", tensor, there[key], source)
        return slips

    def _in_place(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what of a state_dict is memory of the module itself.

        The rest is a copy that get_extra_state() or a hook has made (the FP8 scales of Transformer Engine, for one).
        """
        module = self.module
        own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
        memory = {_memory(tensor) for tensor in own.values() if tensor.numel()}
        return {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and (_memory(value) in memory if value.numel() else key in own)
        }

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        here = self.module.state_dict()
        in_place = self._in_place(here)
        rest = {}
        for key, part in source.pairs(node["state"]).items():
            if key in in_place:
                source.put(part, local(in_place[key]))
            else:
                rest[key] = _spread(source.unpack(f"{name}/{key}", part), here[key])
        if rest and (unknown := self.module.load_state_dict(rest, strict=False).unexpected_keys):
            _log.warning("%s: its state_dict() has keys that its load_state_dict() leaves out: %s", name, unknown)
        passing = self._passing(here)
        for key, part in source.pairs(node["buffers"]).items():
            if key in passing:  # one that is made later, when it is first needed, is not there yet
                owner, leaf, buffer = passing[key]
                if _misfit(key, buffer, part, source):  # such a cache may have grown
                    owner._buffers[leaf] = source.unpack(key, part).to(buffer.device)  # noqa: SLF001 - keeps it non-persistent
                else:
                    source.put(part, local(buffer))


def _memory(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage().data_ptr())


def _misfit(name: str, here: Tensor, node: Json, source: Unpacker) -> list[str]:
    if not isinstance(node, dict) or "item" not in node:
        return [f"{name} is not a tensor in the checkpoint"]
    loaded = source.loaded(node)
    mine = (str(here.dtype).removeprefix("torch."), tuple(local(here).shape), layout_of(here))
    kept = (loaded.dtype, tuple(loaded.shape), node.get("sharded"))
    if mine != kept:
        return [f"{name} is {_told(kept)} in the checkpoint, {_told(mine)} here"]
    if has_other_rows(local(here), loaded):
        return [f"{name} repeats one row here (expand), and its rows differ in the checkpoint (clone() it before)"]
    return []


def _told(kind: tuple[str, tuple[int, ...], Mapping[str, Json] | None]) -> str:
    dtype, shape, layout = kind
    return f"{dtype}{list(shape)}" + ("" if layout is None else f" of {layout['shape']} on a mesh of {layout['mesh']}")


# --- Optimizers ---------------------------------------------------------------------------------------------------


class _Optimizer:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def tree(self) -> object:
        return self._optimizer.state_dict()

    def alike(self, name: str) -> Callable[[str], bool]:
        return lambda item: item.startswith(f"{name}/state/")

    def check(self, name: str, node: Json, source: Unpacker) -> list[str]:
        here = [len(group["params"]) for group in self._optimizer.param_groups]
        there = [len(group["params"]) for group in node["param_groups"]]
        if here != there:
            return [f"{name} has parameter groups of {there} in the checkpoint, of {here} here"]
        slips = list(self._lost_options(name, node["param_groups"]))
        for param, parts in self._pairs(source.pairs(node["state"]), node["param_groups"]):
            for key, part in parts.items():
                if isinstance(part, dict) and part.get("sharded") not in (None, layout_of(param)):
                    kept, mine = part["sharded"], layout_of(param)
                    slips.append(f"{name}: {key} was spread as {kept}, its parameter is spread as {mine}")
        return slips

    def _lost_options(self, name: str, groups: Sequence[Mapping[str, Json]]) -> Iterable[str]:
        """Name options that a group would lose. An option of the class may be missing: a newer torch fills it in."""
        for at, (here, there) in enumerate(zip(self._optimizer.param_groups, groups, strict=True)):
            for key in here.keys() - there.keys() - self._optimizer.defaults.keys():
                yield f"parameter group {at} of {name} has no {key} in the checkpoint (set it after restore())"

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        # A training that is rolled back has moments already: new ones beside them may not fit into the GPU's memory.
        for param, parts in self._pairs(source.pairs(node["state"]), node["param_groups"]):
            for key, mine in self._optimizer.state.get(param, {}).items():
                if isinstance(mine, torch.Tensor) and not _misfit(key, mine, parts.get(key), source):
                    source.fill(parts[key], local(mine))
        state = source.unpack(name, node)
        kept = list(self._pairs(state["state"], state["param_groups"]))
        for param, parts in kept:
            parts.update({key: _spread(part, param) for key, part in parts.items()})
        for group in state["param_groups"]:
            group["params"] = _quick(group["params"])
        self._optimizer.load_state_dict(state)
        # Torch casts what it loads, deep inside too, to the dtype of the parameter: fp32 moments of bf16 weights would
        # lose their bits. Of a text it makes a generator (torch 2.13).
        for param, parts in kept:
            mine = self._optimizer.state[param]
            for key, part in parts.items():
                if key in mine and not isinstance(part, torch.Tensor):
                    mine[key] = part
                elif key in mine and mine[key].dtype != part.dtype:
                    mine[key] = part.to(param.device)

    def _pairs(self, state: Mapping[int, Any], groups: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        """Each parameter that has a state, with that."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            if number in state:
                yield param, state[number]


def _quick(numbers: list[int]) -> Sequence[int]:
    """The same numbers as a range, where they are many and in order.

    torch searches its group's numbers once for each value: 100,000 values of 33,000 parameters took 14 s in a list.
    """
    if len(numbers) < _MANY:
        return numbers
    ordered = range(numbers[0], numbers[0] + len(numbers))
    return ordered if numbers == list(ordered) else numbers


def _spread(part: Value, param: Tensor) -> Value:
    """Make a DTensor again of a local shard, spread like its parameter; also deep inside."""
    if type(part) is dict:
        return {key: _spread(each, param) for key, each in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_spread(each, param) for each in part)
    if not isinstance(part, Sharded):
        return part
    if part.layout != layout_of(param):
        msg = f"a tensor was spread as {part.layout}, its parameter is spread as {layout_of(param)}"
        raise StateError(msg)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# --- All the rest -------------------------------------------------------------------------------------------------


class _OwnEach:
    """Each rank has its own."""

    def alike(self, _name: str) -> Callable[[str], bool]:
        return lambda _item: False

    def check(self, _name: str, _node: Json, _source: Unpacker) -> list[str]:
        return []  # nothing here can be known not to fit


class _Stateful(_OwnEach):
    """A scheduler, a GradScaler, a sampler: whatever has a state_dict of plain values and tensors."""

    def __init__(self, thing: Value) -> None:
        self._thing = thing

    def tree(self) -> object:
        return self._thing.state_dict()

    def check(self, name: str, node: Json, source: Unpacker) -> list[str]:
        if isinstance(self._thing, ResumableSampler | ResumableLoader):
            try:
                self._thing.check(source.unpack(name, node))
            except ValueError as error:
                return [f"{name}: {error}"]
        return []

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        if node or self.tree():  # a scaler that is switched off has nothing, and refuses nothing
            self._thing.load_state_dict(source.unpack(name, node))


class _Plain(_OwnEach):
    """A dict or a list of the user's, which stays the same object."""

    def __init__(self, thing: Value) -> None:
        self._thing = thing

    def tree(self) -> object:
        return dict(self._thing) if isinstance(self._thing, Mapping) else list(self._thing)

    def check(self, name: str, node: Json, _source: Unpacker) -> list[str]:
        kept = "list" if isinstance(node, list) else "dict"
        mine = "dict" if isinstance(self._thing, Mapping) else "list"
        return [] if kept == mine else [f"{name} is a {kept} in the checkpoint, a {mine} here"]

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        value = source.unpack(name, node)
        if isinstance(self._thing, MutableMapping):
            self._thing.clear()
            self._thing.update(value)
        else:
            self._thing[:] = value


class _TorchGenerator(_Stateful):
    def tree(self) -> object:
        return self._thing.get_state()

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        self._thing.set_state(source.unpack(name, node).cpu())


class _NumpyGenerator(_Stateful):
    def tree(self) -> object:
        return self._thing.bit_generator.state

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        self._thing.bit_generator.state = source.unpack(name, node)


class RandomStates(_OwnEach):
    """The global random number generators of this process."""

    def tree(self) -> object:
        numpy = sys.modules.get("numpy.random")  # a job that never loads numpy draws nothing from it
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if cuda else [],
        }

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        self.put_back(source.unpack(name, node))

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Let every generator go on from a state of `tree`."""
        random.setstate(state["python"])
        if state["numpy"] is not None:
            import numpy as np

            np.random.set_state(state["numpy"])  # noqa: NPY002 - it is the old global one that scripts draw from
        torch.set_rng_state(state["torch"])
        here, there = torch.cuda.device_count(), len(state["cuda"])
        if there not in (0, here):
            _log.warning(
                "the checkpoint has the random numbers of %d GPUs, and %d are here: each goes on with its own. "
                "Training that ran on another GPU draws others from now on",
                there,
                here,
            )
        for index, each in enumerate(state["cuda"][:here]):
            torch.cuda.set_rng_state(each, index)
