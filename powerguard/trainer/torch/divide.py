"""What all ranks of a DDP job hold alike, divided among them: each keeps its share, and gets the rest from the others.

Eight ranks on one host would else write the same parameters and moments eight times, and an emergency would take eight
times as long. Only loading needs a collective; saving needs none, since every rank finds the same division by itself.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import torch
import torch.distributed as dist

from powerguard.trainer.store.items import Item, Loaded
from powerguard.trainer.torch.tree import Json, StateError, Tensor, mark_of

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
        is_on_gpu = torch.cuda.is_available() and "gloo" not in str(dist.get_backend())
        self._device = torch.device("cuda" if is_on_gpu else "cpu")
        self._structure: Sequence[Any] = ()
        self._mine: list[int] = []
        self._plan = ""

    def check_alike(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise StateError, on every rank, unless all hold the same, by the sums of their bytes. A collective."""
        seen = sha256(b"".join(mark_of(name, tensor) for name, tensor in tensors))
        digests: list[Any] = [None] * self._ranks
        dist.all_gather_object(digests, seen.hexdigest())
        if len(set(digests)) != 1:
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
        return [items[number] for number in self._mine], self._plan

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
        entries = [[item.name, owners[item.name], item.dtype, list(item.shape), item.size_bytes] for item in divided]
        self._plan = json.dumps({"ranks": self._ranks, "items": entries}, separators=(",", ":"))

    def complete(self, items: Mapping[str, Loaded], plan: Json) -> Mapping[str, Loaded]:
        """All items, those of the other ranks too. A collective: each rank sends its share to all."""
        if plan["ranks"] != self._ranks:
            msg = f"the checkpoint is divided among {plan['ranks']} ranks, here are {self._ranks}"
            raise StateError(msg)
        whole = dict(items)
        for name, owner, dtype, shape, size_bytes in plan["items"]:
            memory = bytearray(items[name].data) if owner == self._rank else bytearray(size_bytes)
            self._broadcast(torch.frombuffer(memory, dtype=torch.uint8), owner)
            whole[name] = Loaded(name, dtype, tuple(shape), memoryview(memory))
        return whole

    def _broadcast(self, buffer: Tensor, owner: int) -> None:
        for start in range(0, buffer.numel(), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            moved = piece.to(self._device)
            dist.broadcast(moved, src=owner)
            if moved is not piece:
                piece.copy_(moved)
