"""A small language model that learns this project's documents letter by letter, and survives the power cut.

    python examples/train_char.py --dir /tmp/char
    torchrun --nproc-per-node 2 examples/train_char.py --dir /tmp/char

It needs PyTorch; on GPUs it uses one for each rank. While it trains, ask it for a checkpoint (docs/guides/torch.md has
all of these):

    curl --unix-socket /tmp/char/char.sock -X POST http://char/api/v1/trigger_checkpoint
    curl --unix-socket /tmp/char/char.sock -X POST http://char/api/v1/resume

or kill it with -9, and start it again: it goes on at the step, and every further loss is the one that would have come.
The lines that do all this are the marked ones.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from powerguard.trainer import Guard  # <--
from powerguard.trainer.torch import ResumableLoader, TorchState  # <--

CONTEXT = 48


class Chars(torch.utils.data.Dataset):
    """Windows of a text, as numbers of its letters."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        self.letters = len(letters)
        number = {letter: at for at, letter in enumerate(letters)}
        self._numbers = torch.tensor([number[letter] for letter in text])

    def __len__(self) -> int:
        return (len(self._numbers) - 1) // CONTEXT

    def __getitem__(self, at: int) -> torch.Tensor:
        return self._numbers[at * CONTEXT : (at + 1) * CONTEXT + 1]


class Model(nn.Module):
    """A transformer of two layers, with dropout."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letter(text) + self.place(torch.arange(text.shape[1], device=text.device))
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def documents() -> str:
    """The text to learn: every document of this project."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(docs.rglob("*.md")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small language model that survives the power cut.")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/char"), help="where checkpoints and the socket go")
    parser.add_argument("--socket", type=Path, help="where to be asked (default: DIR/char.sock)")
    parser.add_argument("--text", type=Path, help="another text to learn")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one checkpoint to the next")
    conducts = ("continue", "pause", "exit")
    parser.add_argument("--conduct", choices=conducts, default="pause", help="the most it will do when asked")
    parser.add_argument("--quiet", action="store_true", help="print only where it begins and how it ends")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ranks, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group()
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(rank)

    data = Chars(args.text.read_text(encoding="utf-8") if args.text else documents())
    loader = ResumableLoader(data, batch_size=16, seed=1, rank=rank, ranks=ranks, drop_last=True)  # <--
    model = Model(data.letters).to(device)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    args.dir.mkdir(parents=True, exist_ok=True)
    state = TorchState(model=wrapped, optimizer=optimizer, scheduler=scheduler, dataloader=loader)  # <--
    socket = args.socket or args.dir / "char.sock"
    options = {"every_s": args.every, "socket": socket, "conduct": args.conduct}
    with Guard(state, args.dir / "checkpoints", job="char", **options) as guard:  # <--
        step = guard.restore()  # <--
        loss = torch.tensor(float("nan"))
        if rank == 0:
            print(f"step {step}: {'begin' if step == 0 else 'go on'}, {data.letters} letters", flush=True)
        while step < args.steps:
            for batch in loader:
                text = batch.to(device)
                optimizer.zero_grad()
                loss = functional.cross_entropy(wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if rank == 0 and not args.quiet and step % 20 == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
                guard.step(step)  # <--
                if step == args.steps:
                    break
        guard.save(step)  # <-- what the last minutes brought, too
        if rank == 0:
            print(f"step {step}: done, loss {loss.item().hex()}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
