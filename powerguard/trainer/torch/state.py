"""The whole state of a PyTorch training as a `State`: what the next step depends on, so that it goes on bit for bit.

    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    guard = Guard(state, "/nvme/llm", job="llm")

Each rank keeps its own: of DDP that is a full copy, of FSDP2 (`fully_shard`) the local shards, which need the same
number of ranks again (torch.distributed.checkpoint reshards, see `powerguard.trainer.dcp`). A step boundary is after
`optimizer.step()` (and `scheduler.step()`): gradients are not kept, so never checkpoint between two micro-batches.
"""

import json
import logging
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from hashlib import sha256
from inspect import signature
from operator import itemgetter
from typing import Any, Final, Protocol

import torch

from powerguard.trainer.store.items import JSON, Buffer, Item, Loaded
from powerguard.trainer.torch.copier import OVERLAPS, Copier
from powerguard.trainer.torch.data import ResumableLoader, ResumableSampler
from powerguard.trainer.torch.ddp import settle_buckets, warn_of_unwrapped
from powerguard.trainer.torch.device import CudaDevice, Device
from powerguard.trainer.torch.divide import Division
from powerguard.trainer.torch.tree import (
    Json,
    Packer,
    Rows,
    Sharded,
    StateError,
    Tensor,
    TensorItem,
    Unpacker,
    Value,
    has_other_rows,
    holds,
    is_freed,
    layout_of,
    local,
    mark_of,
    place_of,
)
from powerguard.trainer.weights import FORMAT, INDEX, TAG

_log = logging.getLogger("powerguard.trainer")
_INDEX_BYTES: Final = 4096
"""The index is filled up to a multiple of this with spaces: a number with one more digit moves nothing behind it."""

Module = Any
Optimizer = Any
"""Those of torch."""

_MAX_NAMED: Final = 5
_MANY: Final = 1000
_UNUSED: Final = 2
"""States of a training that has begun: the first one may be taken before its first sample."""


_Named = Sequence[tuple[str, Tensor]]
"""The parameters of all modules, by name."""


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
    keep_frozen: False leaves out the parameters of the model that need no gradient (LoRA, QLoRA). Load them, as before
        the training, before `restore`, which refuses others. One that is changed or trained later is kept from then on.
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
        keep_frozen: bool = True,
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
                self._components[name] = _component(name, part, keep_frozen=keep_frozen or word != "model")
                if word in ("optimizer", "scheduler"):
                    self._kinds[name] = _kind(word, part)
        if ema is not None:
            self._components["ema"] = _component("ema", ema)
        # Modules first: what is one with their tensors only here must not be filled before them.
        for name, part in sorted((extra or {}).items(), key=lambda each: not isinstance(each[1], torch.nn.Module)):
            self._components[f"extra.{name}"] = component = _component(f"extra.{name}", part)
            if isinstance(component, _Module) and component.is_empty:
                text = "extra.%s: its state_dict() is empty, so nothing of it is kept (torchmetrics: persistent(True))"
                _log.warning(text, name)
        if random:
            self._components["random"] = RandomStates()
        modules = [part for _, part in _each("model", model) if isinstance(part, torch.nn.Module)]
        settle_buckets(modules)
        warn_of_unwrapped(modules)
        self._division = self._divided() if divide else None
        self._known: dict[str, Rows] = {}
        self._was_whole = False
        """All that optimizers with a state train was in a state before."""
        self._lost = ""
        """What the last one lacked of it."""
        optimizers = [inner(part) for _, part in _each("optimizer", optimizer)] if overlap == "optimizer" else []
        self.copier = Copier(device or CudaDevice(), overlap, optimizers)
        self.copier.meet(param for module in modules for param in module.parameters())

    def _divided(self) -> Division:
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
        named = list(self._named_parameters())
        index: dict[str, Json] = {"format": FORMAT, "parts": parts, "kinds": self._kinds, "orders": self._orders(named)}
        index["frozen"] = _frozen(named)
        items, structure = packer.items, packer.structure
        self._refuse_unkept(items, named)
        if self._division is not None:
            items, plan = self._division.share(items, structure, self._alike)
            index["divided"] = packer.stand_in(plan)
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
        slips += self._other_orders(index.get("orders", {}))
        source = Unpacker(self._whole(items, index))
        for name, component in self._components.items():
            if name in parts:
                try:
                    slips += component.check(name, parts[name], source)
                except (KeyError, TypeError, AttributeError) as error:
                    msg = f"{name}: the checkpoint does not hold together ({type(error).__name__}: {error})"
                    raise StateError(msg) from error
        if slips:
            more = f"; and {len(slips) - _MAX_NAMED} more" if len(slips) > _MAX_NAMED else ""
            msg = f"the checkpoint does not fit this training: {'; '.join(slips[:_MAX_NAMED])}{more}"
            raise StateError(msg)
        self._warn_of_unfrozen(index.get("frozen"))
        self.copier.before_update()
        try:
            self._put_back(parts, source)
        except StateError as error:
            if not self.copier.unregister_loaded():
                raise
            _log.warning(
                "the load from registered memory failed, and is made once more from ordinary memory: %s",
                error.__cause__,
            )
            self._put_back(parts, source)

    def _put_back(self, parts: Mapping[str, Json], source: Unpacker) -> None:
        for name, component in self._components.items():  # random numbers come last: loading the others may draw some
            try:
                component.load(name, parts[name], source)
            except Exception as error:
                msg = (
                    f"{name}: was not put back ({type(error).__name__}: {error}); what comes before it has been"
                    " (make all objects again before you retry)"
                )
                raise StateError(msg) from error

    def _other_kinds(self, kinds: Mapping[str, Json]) -> Iterable[str]:
        """Name each optimizer and schedule of another class: most would be loaded, and fail at the next step."""
        for name, current in self._kinds.items():
            if (kept := kinds.get(name, current)) != current:
                yield f"{name} is {kept} in the checkpoint, {current} here (make it with {kept})"

    def _orders(self, named: _Named) -> dict[str, str]:
        """Say in which order each optimizer has the model's parameters: a digest of their names.

        The state of an optimizer names them by number alone, and a set has another order in each process.
        """
        names = {id(param): key for key, param in named}
        orders = {}
        for name, component in self._components.items():
            if isinstance(component, _Optimizer):
                order = "\n".join(names.get(id(param), "") for param in component.params())
                orders[name] = sha256(order.encode()).hexdigest()[:16]
        return orders

    def _warn_of_unfrozen(self, kept: Json) -> None:
        """Warn of parameters that training had frozen, or the reverse, and this program has not (None: not known)."""
        here = _frozen(self._named_parameters())
        unlike = sorted({*here} ^ {*map(str, kept)}) if isinstance(kept, list) else []
        if unlike:
            _log.warning(
                "requires_grad of %d parameters is not as it was when the checkpoint was saved (%s ...), and stays as"
                " it is here: a program that changes it in the course of training does so again at the resume",
                len(unlike),
                unlike[0],
            )

    def _refuse_unkept(self, items: Sequence[Item], named: _Named) -> None:
        """Raise StateError for what an optimizer trains, or an optimizer within it keeps, and no item has.

        That is for the first steps. Later, when a layer has been removed, say, an emergency must not fail for it.
        """
        optimizers = {name: each for name, each in self._components.items() if isinstance(each, _Optimizer)}
        lost = next(_unkept(optimizers, items, {id(param) for _, param in named}), "")
        if lost and not self._was_whole:
            raise StateError(lost)
        if lost and lost != self._lost:
            _log.warning("%s: it is in no checkpoint", lost)
        self._lost = lost
        self._was_whole = self._was_whole or any(each.has_state for each in optimizers.values())

    def _other_orders(self, orders: Mapping[str, Json]) -> Iterable[str]:
        for name, current in self._orders(list(self._named_parameters())).items():
            if orders.get(name, current) != current:
                yield f"{name} had other parameters of the model, or another order (sort them by name, if it is a set)"

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for name, component in self._components.items():
            if isinstance(component, _Module):
                yield from ((f"{name}/{_bare(key)}", param) for key, param in component.module.named_parameters())

    def _whole(self, items: Mapping[str, Loaded], index: Mapping[str, Json]) -> Mapping[str, Loaded]:
        """What this rank keeps, and what the others keep for it."""
        if ("divided" in index) != (self._division is not None):
            msg = f"the checkpoint was written with divide={'divided' in index}; load it with the same"
            raise StateError(msg)
        return items if self._division is None else self._division.complete(items, index["divided"])


def _unkept(optimizers: Mapping[str, "_Optimizer"], items: Sequence[Item], named: Collection[int]) -> Iterator[str]:
    """Say what an optimizer trains or relies on that is neither a parameter that has a name, by id, nor in an item."""
    lost = [(name, *found) for name, each in optimizers.items() for found in each.relies_on()]
    lost = [each for each in lost if id(each[2]) not in named]
    memory = {_memory(item.tensor) for item in items if isinstance(item, TensorItem)} if lost else set()
    for name, within, tensor in lost:
        if tensor.numel() and _memory(tensor) not in memory and within:
            yield f"{name}.{within}: its state is not in {name}.state_dict() (add it, and load it again)"
        elif tensor.numel() and _memory(tensor) not in memory:
            yield (
                f"{name} trains a parameter of shape {list(tensor.shape)} that no module here has (give TorchState its"
                " module, such as the loss, or the tensor itself: extra={'name': [tensor]})"
            )


def _frozen(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Name the parameters that need no gradient now."""
    return [key for key, param in named if not param.requires_grad]


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


def _component(name: str, thing: object, *, keep_frozen: bool = True) -> Component:
    if isinstance(thing, torch.nn.Module):
        module = unwrapped(thing)
        return _Module(name, module, None if keep_frozen else _Frozen(name, module))
    if isinstance(thing, torch.optim.Optimizer):
        if type(inner(thing)).__name__ == "ZeroRedundancyOptimizer":
            msg = (
                f"{name}: a ZeroRedundancyOptimizer gives its state to one rank alone, so that no other could save"
                " (shard with FSDP2: torch.distributed.fsdp.fully_shard)"
            )
            raise StateError(msg)
        return _Optimizer(thing)
    if isinstance(thing, torch.Generator):
        return _TorchGenerator(thing)
    if hasattr(thing, "bit_generator"):
        return _NumpyGenerator(thing)
    if type(thing).__name__ in ("DataLoaderShard", "DataLoaderDispatcher") and not hasattr(thing, "dl_state_dict"):
        msg = (
            f"{name}: a loader that Accelerate has prepared does not keep its position (give TorchState and the loop"
            " a ResumableLoader that is not prepared, with rank=process_index and ranks=num_processes)"
        )
        raise StateError(msg)
    if isinstance(thing, ResumableLoader):
        return _Loader(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Stateful(thing)
    if isinstance(thing, MutableMapping | MutableSequence):
        return _Plain(thing)
    msg = f"{name}: a {type(thing).__qualname__} has no state_dict() and load_state_dict(), and is not a dict or list"
    if hasattr(thing, "batch_sampler") and hasattr(thing, "dataset"):
        msg += " (powerguard.trainer.torch.data.ResumableLoader, or torchdata's StatefulDataLoader, keeps its position)"
    elif name.startswith("extra."):
        msg += " (give the dict or list in which training has it: a resume fills that again)"
    raise StateError(msg)


def unwrapped(module: Module) -> Module:
    """Look through DDP, DataParallel and torch.compile. Raises StateError for FSDP1, also of a part of the module."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        msg = "FullyShardedDataParallel (FSDP1) hides its shards: use FSDP2 (torch.distributed.fsdp.fully_shard)"
        raise StateError(msg)
    while True:
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "DataParallel"):
            module = module.module
        elif kind == "OptimizedModule":
            module = module._orig_mod  # noqa: SLF001 - torch documents no other way
        else:
            return module


# --- Modules ------------------------------------------------------------------------------------------------------


class _Frozen:
    """Which parameters of a module nothing trains, so that they need not be kept."""

    def __init__(self, name: str, module: Module) -> None:
        self._name = name
        self._module = module
        self._versions = {key: _version(param) for key, param in _named(module) if not param.requires_grad}
        self._digest: tuple[set[str], str] = (set(), "")

    def names(self) -> set[str]:
        """Return those that still need no gradient, and were not changed in place: torch counts that."""
        now = {key: param for key, param in _named(self._module) if key in self._versions}
        begun = {
            key
            for key, version in self._versions.items()
            if key not in now or now[key].requires_grad or _version(now[key]) != version
        }
        if begun:
            _log.warning(
                "%s: parameters that were frozen are changed or trained now, and are kept from now on: %d (%s ...)",
                self._name,
                len(begun),
                min(begun),
            )
            self._versions = {key: version for key, version in self._versions.items() if key not in begun}
        return set(self._versions)

    def digest(self) -> str:
        """Return a digest of what they hold; computed once, as it is read to the last byte."""
        names = set(self._versions)
        if self._digest[0] != names:
            self._digest = names, _digest(self._module, names)
        return self._digest[1]


def _named(module: Module) -> Iterable[tuple[str, Tensor]]:
    return ((_bare(key), param) for key, param in module.named_parameters(remove_duplicate=False))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - as in copier.py


def _digest(module: Module, names: Collection[str]) -> str:
    lines = (mark_of(key, param) for key, param in sorted(_named(module), key=itemgetter(0)) if key in names)
    return sha256(b"".join(lines)).hexdigest()[:32]


def _is_within(key: str, names: Collection[str]) -> bool:
    """Whether this is one of these parameters, or what belongs to it, as the scales of a quantised one do."""
    while key and key not in names:
        key = key.rpartition(".")[0]
    return bool(key)


class _Module:
    """Loaded in place, tensor by tensor: no second copy of the model is ever in memory."""

    def __init__(self, name: str, module: Module, frozen: _Frozen | None = None) -> None:
        self.module = module
        self._name = name
        self._frozen = frozen

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is kept, now or later."""
        return not self.module.state_dict() and not any(part._buffers for part in self.module.modules())  # noqa: SLF001 - named_buffers() leaves out those that are None

    def _refuse_lazy(self) -> None:
        for key, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                msg = f"{self._name}/{key} has no shape yet (run the model once before restore() and the first step)"
                raise StateError(msg)

    def tree(self) -> object:
        self._refuse_lazy()
        state = self.module.state_dict()
        kept: dict[str, Any] = {_bare(key): value for key, value in state.items()}
        buffers = {_bare(name): buffer for name, (_, _, buffer) in self._passing(state).items()}
        if self._frozen is None or not (frozen := self._frozen.names()):
            return {"state": kept, "buffers": buffers}
        kept = {key: value for key, value in kept.items() if not _is_within(key, frozen)}
        return {"state": kept, "buffers": buffers, "frozen": self._frozen.digest()}

    def _passing(self, state: Mapping[str, object]) -> dict[str, tuple[Any, str, Any]]:
        """Buffers that no state_dict has (persistent=False): owner, name in it, buffer."""
        kept = {_bare(key) for key in state}
        found: dict[str, tuple[Any, str, Any]] = {}
        for prefix, owner in self.module.named_modules():
            for leaf, buffer in owner._buffers.items():  # noqa: SLF001 - named_buffers() does not give the owner
                name = f"{prefix}.{leaf}" if prefix else leaf
                if buffer is not None and _bare(name) not in kept:
                    found[name] = (owner, leaf, buffer)
        return found

    def alike(self, name: str) -> Callable[[str], bool]:
        params = {f"{name}/state/{_bare(param)}" for param, _ in self.module.named_parameters()}
        return params.__contains__  # buffers are not: each rank has the running statistics of its own data

    def check(self, name: str, node: Json, source: Unpacker) -> list[str]:
        self._refuse_lazy()
        here = self.module.state_dict()
        there = source.pairs(node["state"])
        named, unset = {_bare(key): key for key in here}, self._unset()
        strange = [key for key in there if key not in named and key not in unset]
        slips = [f"{name}/{key} is in the checkpoint and not in the model" for key in strange]
        missing = named.keys() - there.keys()
        if missing and "frozen" in node:
            slips += self._other_frozen(missing, node["frozen"])
        else:
            slips += [f"{name}/{key} is in the model and not in the checkpoint" for key in named if key in missing]
        first: dict[object, str] = {}
        for key, tensor in self._in_place(here).items():
            bare = _bare(key)
            if bare not in there:
                continue
            misfit = _misfit(f"{name}/{bare}", tensor, there[bare], source)
            slips += [] if misfit and self._sizes_itself(key) else misfit
            other = first.setdefault(place_of(local(tensor)), bare)
            if other != bare and not misfit and not source.are_same(there[other], there[bare]):
                slips.append(f"{name}/{other} and {name}/{bare} are one tensor here, and differ in the checkpoint")
        return slips

    def _other_frozen(self, missing: Collection[str], digest: Json) -> Iterable[str]:
        """Say whether what the checkpoint left out is something else here."""
        frozen = {key for key, _ in _named(self.module) if key in missing}
        if _digest(self.module, frozen) != digest:
            yield (
                f"{self._name} was kept without {len(frozen)} frozen parameters, and those here are others (before"
                " restore(), load the base model that training began with; load_weights() reads the trained ones alone)"
            )

    def _sizes_itself(self, key: str) -> bool:
        """Whether a tensor's module sees to its size at a load, as the observers of a quantisation do."""
        try:
            owner = type(self.module.get_submodule(key.rpartition(".")[0]))
        except AttributeError:  # a hook has made the name
            return False
        is_own = owner._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # noqa: SLF001 - overridden to load otherwise
        return is_own and not owner.__module__.startswith("torch.nn.")

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
        here, there = self.module.state_dict(), source.pairs(node["state"])
        in_place = self._in_place(here)
        frozen = set() if self._frozen is None else self._frozen.names()
        rest = {}
        for key, value in here.items():
            if _bare(key) not in there:
                continue  # frozen
            part = there[_bare(key)]
            if key in in_place and not _misfit(key, value, part, source):
                # One that is written over counts as changed, and is kept from then on: not if it has these bytes.
                if _bare(key) not in frozen or not holds(local(value), source.loaded(part)):
                    source.put(part, local(value))
            else:
                rest[key] = _spread(source.unpack(f"{name}/{key}", part), value)
        if rest and (unknown := self._load_rest(rest, here)):
            _log.warning(
                "%s: its state_dict() has keys that its load_state_dict() leaves out: %d (%s ...)",
                name,
                len(unknown),
                unknown[0],
            )
        passing = {_bare(key): found for key, found in self._passing(here).items()}
        buffers = source.pairs(node["buffers"])
        for key, (owner, leaf) in self._unset().items():
            if (late := there.get(key, buffers.get(key))) is not None:
                owner._buffers[leaf] = source.unpack(key, late)  # noqa: SLF001 - keeps it as persistent as it is
        for key, part in buffers.items():
            if key not in passing:
                continue
            owner, leaf, buffer = passing[key]
            if _misfit(key, buffer, part, source):  # such a cache may have grown
                owner._buffers[leaf] = source.unpack(key, part).to(buffer.device)  # noqa: SLF001 - keeps it non-persistent
            else:
                source.put(part, local(buffer))

    def _load_rest(self, rest: Mapping[str, Any], here: MutableMapping[str, Any]) -> Sequence[str]:
        """Have the module load what lies nowhere in it, and return what it leaves out, if it says so.

        A load_state_dict of the user's own may return nothing, or be always strict: that one is given all. The tensors
        in `here` are memory of the module, and hold what was put back.
        """
        options = signature(self.module.load_state_dict).parameters.values()
        if any(each.name == "strict" or each.kind is each.VAR_KEYWORD for each in options):
            answer = self.module.load_state_dict(rest, strict=False)
        else:
            here.update(rest)
            answer = self.module.load_state_dict(here)
        return getattr(answer, "unexpected_keys", [])

    def _unset(self) -> dict[str, tuple[Any, str]]:
        """Return the buffers that have a name and, until they are first needed, no value: owner and name in it."""
        return {
            _bare(f"{prefix}.{leaf}" if prefix else leaf): (owner, leaf)
            for prefix, owner in self.module.named_modules()
            for leaf, buffer in owner._buffers.items()  # noqa: SLF001 - named_buffers() leaves these out
            if buffer is None
        }


def _bare(key: str) -> str:
    """Return a name without the wrappers of torch.compile and of activation checkpointing.

    A job may begin with them or not. A state_dict lacks the latter's, and `named_parameters` has them.
    """
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _memory(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage().data_ptr())


def _misfit(name: str, here: Tensor, node: Json, source: Unpacker) -> list[str]:
    if not isinstance(node, dict) or "item" not in node:
        return [f"{name} is not a tensor in the checkpoint"]
    if here.is_meta:
        return [f"{name} is on the meta device here (give it memory before restore(): to_empty())"]
    if is_freed(local(here)):
        return [f"{name} has no memory here: it was freed (gather it before restore())"]
    loaded = source.loaded(node)
    current = (str(here.dtype).removeprefix("torch."), tuple(local(here).shape), layout_of(here))
    kept = (loaded.dtype, tuple(loaded.shape), node.get("sharded"))
    if current != kept:
        return [f"{name} is {_describe(kept)} in the checkpoint, {_describe(current)} here"]
    if has_other_rows(local(here), loaded):
        return [f"{name} repeats one row here (expand), and its rows differ in the checkpoint (clone() it before)"]
    return []


def _describe(kind: tuple[str, tuple[int, ...], Mapping[str, Json] | None]) -> str:
    dtype, shape, layout = kind
    return f"{dtype}{list(shape)}" + ("" if layout is None else f" of {layout['shape']} on a mesh of {layout['mesh']}")


# --- Optimizers ---------------------------------------------------------------------------------------------------


class _Optimizer:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def params(self) -> list[Tensor]:
        """Return its parameters, in its order."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    @property
    def has_state(self) -> bool:
        return bool(self._optimizer.state)

    def relies_on(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what it trains, and by its attribute's name what an optimizer within it (SAM's) has as a state."""
        state = self._optimizer.state
        yield from (
            ("", each) for each in self.params() if each.requires_grad and (each.grad is not None or each in state)
        )
        for key, within in vars(inner(self._optimizer)).items():
            if isinstance(within, torch.optim.Optimizer):
                states = (state for state in within.state.values() if isinstance(state, Mapping))
                tensors = (each for state in states for each in state.values() if isinstance(each, torch.Tensor))
                yield from ((key, each) for each in tensors)

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
                    kept, current = part["sharded"], layout_of(param)
                    slips.append(f"{name}: {key} was spread as {kept}, its parameter is spread as {current}")
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
        rates = self._fill_options(node["param_groups"], source)
        state = source.unpack(name, node)
        kept = list(self._pairs(state["state"], state["param_groups"]))
        for param, parts in kept:
            parts.update({key: _spread(part, param) for key, part in parts.items()})
        for group in state["param_groups"]:
            group["params"] = _quick(group["params"])
        self._optimizer.load_state_dict(state)
        for at, key, mine in rates:
            self._optimizer.param_groups[at][key] = mine
        # Torch casts what it loads, deep inside too, to the dtype of the parameter: fp32 moments of bf16 weights would
        # lose their bits. Of a text it makes a generator (torch 2.13).
        for param, parts in kept:
            mine = self._optimizer.state[param]
            for key, part in parts.items():
                if key in mine and not isinstance(part, torch.Tensor):
                    mine[key] = part
                elif key in mine and mine[key].dtype != part.dtype:
                    mine[key] = part.to(param.device)

    def _fill_options(self, groups: Sequence[Mapping[str, Json]], source: Unpacker) -> list[tuple[int, str, Tensor]]:
        """Fill the groups' options that are tensors, and return them: torch puts copies in their place.

        A CUDA graph reads a learning rate where it lay when the graph was recorded, and a schedule changes it there.
        """
        filled = []
        for at, (here, there) in enumerate(zip(self._optimizer.param_groups, groups, strict=True)):
            for key, value in here.items():
                if isinstance(value, torch.Tensor) and not _misfit(key, value, there.get(key), source):
                    source.fill(there[key], value)
                    if source.unpack(key, there[key]) is value:
                        filled.append((at, key, value))
        return filled

    def _pairs(self, state: Mapping[int, Any], groups: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        """Each parameter that has a state, with that."""
        numbers = [number for group in groups for number in group["params"]]
        for param, number in zip(self.params(), numbers, strict=True):
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


def _spread(part: Value, here: Value) -> Value:
    """Make DTensors of local shards again: each as what has its place here or, within a parameter's state, as that."""
    if type(part) in (dict, OrderedDict):
        return type(part)((key, _spread(each, _within(here, key))) for key, each in part.items())
    if type(part) in (list, tuple):
        return type(part)(_spread(each, _within(here, at)) for at, each in enumerate(part))
    if not isinstance(part, Sharded):
        return part
    if part.layout != layout_of(here):
        msg = f"a tensor was spread as {part.layout}, and what has its place here is spread as {layout_of(here)}"
        raise StateError(msg)
    if part.local.numel() and local(here).data_ptr() == part.local.data_ptr():
        return here  # it was filled
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.local, here.device_mesh, here.placements, run_check=False, shape=here.shape, stride=here.stride()
    )


def _within(here: Value, key: Value) -> Value:
    if isinstance(here, Mapping):
        return here.get(key)
    if isinstance(here, Sequence):
        return here[key] if key < len(here) else None
    return here


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
        if isinstance(self._thing, ResumableSampler | ResumableLoader):  # the others say so when they are loaded
            try:
                self._thing.check(source.unpack(name, node))
            except ValueError as error:
                return [f"{name}: {error}"]
        return []

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        if not node and not self.tree():
            return  # a scaler that is switched off has nothing, and would refuse nothing
        value = source.unpack(name, node)
        is_spread = '"sharded":' in json.dumps(node, separators=(",", ":"))
        self._thing.load_state_dict(_spread(value, self._thing.state_dict()) if is_spread else value)


class _Loader(_Stateful):
    """A loader from which training must draw by itself: what draws for it would not be counted."""

    def __init__(self, name: str, loader: ResumableLoader) -> None:
        super().__init__(loader)
        self._name = name
        self._looks = 0

    def tree(self) -> object:
        self._looks += 1
        if self._looks == _UNUSED and not self._thing.is_used:
            _log.warning(
                "%s: training draws nothing from this loader, so that a resume begins at the epoch's first sample"
                " (iterate over this very loader, not over one that Accelerate has prepared)",
                self._name,
            )
        return super().tree()


class _Plain(_OwnEach):
    """A dict or a list of the user's, which stays the same object."""

    def __init__(self, thing: Value) -> None:
        self._thing = thing

    def tree(self) -> object:
        return dict(self._thing) if isinstance(self._thing, Mapping) else list(self._thing)

    def check(self, name: str, node: Json, _source: Unpacker) -> list[str]:
        kept = "list" if isinstance(node, list) else "dict"
        current = "dict" if isinstance(self._thing, Mapping) else "list"
        return [] if kept == current else [f"{name} is a {kept} in the checkpoint, a {current} here"]

    def load(self, name: str, node: Json, source: Unpacker) -> None:
        _fill_alike(self._thing, node, source)
        _put_into(self._thing, _spread(source.unpack(name, node), self._thing), set())


def _put_into(here: Value, kept: Value, filled: set[int]) -> None:
    """Give a dict or a list what was kept; those within it stay the same objects, too. filled: which were, by id."""
    filled.add(id(here))
    within = dict(here) if isinstance(here, Mapping) else dict(enumerate(here))
    for key in list(kept) if isinstance(kept, Mapping) else range(len(kept)):
        value = within.get(key)
        if type(value) is type(kept[key]) in (dict, OrderedDict, Counter, list) and id(value) not in filled:
            _put_into(value, kept[key], filled)
            kept[key] = value
    if isinstance(here, MutableMapping):
        here.clear()
        here.update(kept)
        return
    while here:
        here.pop()
    here.extend(kept)


def _fill_alike(here: object, node: Json, source: Unpacker) -> None:
    """Fill each tensor that fits what was kept in its place: training may hold it by other names, too."""
    if isinstance(here, torch.Tensor):
        if isinstance(node, dict) and node.get(TAG) == "tensor" and not _misfit("", here, node, source):
            source.fill(node, local(here))
        return
    inside = source.inside(node)
    if isinstance(here, Mapping):
        pairs: Iterable[tuple[Any, Any]] = here.items()
    else:
        pairs = enumerate(here) if isinstance(here, Sequence) and not isinstance(here, str | bytes) else ()
    for key, each in pairs:
        if key in inside:
            _fill_alike(each, inside[key], source)


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
