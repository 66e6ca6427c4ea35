"""One rank of a job of real processes: a barrier per step, shards and a manifest in a folder, a report on a pipe."""

import json
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from powerguard.trainer.ranks import Ranks, RanksError, SocketRanks
from powerguard.trainer.ranks.agreement import Agreement, GenerationOverError, Limits
from powerguard.trainer.ranks.machine import Generation
from powerguard.wire import TriggerRequest

LIMITS = Limits(dead_s=6.0, reach_s=60.0, write_s=60.0, late_s=10.0, lost_s=6.0, beat_s=0.05)


class Guest(SocketRanks):
    """A rank of a job whose store another process holds, as torchrun's agent does: it outlives every rank."""

    def _serve(self) -> None:
        pass


def work(pipe: Connection, store: str, folder: Path, rank: int, size: int, step_s: float) -> None:
    """Train until told to stop. On the pipe come `{"open": request}`, `{"resume": 1}`, `{"stop": 1}`."""
    kind = SocketRanks if store == "rank 0" else Guest
    ranks = kind(folder / "s", rank, size, join_s=60.0)
    agreement = Agreement(ranks, limits=LIMITS)
    agreement.step = 0
    worker = Worker(pipe, folder, ranks, agreement)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.say(ready=rank)
    try:
        worker.train(step_s)
    except (TimeoutError, RanksError) as error:
        worker.say(broken=str(error))
        worker.stop.wait(100)
    worker.say(gone=rank)
    os._exit(0)  # a rank that ends without a word to the others: what they make of it is theirs


class Worker:
    def __init__(self, pipe: Connection, folder: Path, ranks: Ranks, agreement: Agreement) -> None:
        self.pipe, self.folder, self.ranks, self.agreement = pipe, folder, ranks, agreement
        self.stop = threading.Event()
        self.said = threading.Lock()

    def say(self, **what: object) -> None:
        with self.said:
            self.pipe.send({"rank": self.ranks.rank, **what})

    def listen(self) -> None:
        while True:
            try:
                order: dict[str, Any] = self.pipe.recv()
            except EOFError:
                os._exit(1)
            try:
                if "open" in order:
                    opened = self.agreement.open(TriggerRequest(**order["open"]))
                    self.say(opened=opened.number)
                    threading.Thread(target=self.watch, args=[opened.number], daemon=True).start()
                elif "watch" in order:
                    threading.Thread(target=self.watch, args=[order["watch"]], daemon=True).start()
                elif "resume" in order:
                    self.agreement.resume()
                    self.say(resumed=order["resume"])
                elif "stop" in order:
                    self.stop.set()
            except RanksError as error:
                self.say(refused=str(error))

    def watch(self, number: int) -> None:
        """Say how a generation ended, as a host's endpoint would."""
        while (known := self.agreement.generation(number)) is None or known.ended is None:
            if self.agreement.lost and known is None:
                self.say(answer=number, ok=False, lost=True, digest="", error=self.agreement.lost)
                return
            time.sleep(0.002)
        ended = known.ended
        self.say(answer=number, ok=ended.ok, lost=ended.lost, digest=ended.digest, error=ended.error, step=known.step)

    def train(self, step_s: float) -> None:
        collective = self.ranks.clone()
        agreement, step = self.agreement, 0
        while not self.stop.is_set():
            time.sleep(step_s)
            if collective.add(f"b/{step}#", 1) == self.ranks.size:
                collective.set(f"b/{step}", b"go")
            collective.get(f"b/{step}", 100.0)
            step += 1
            agreement.step = step
            if step >= agreement.due:
                while (generation := agreement.wait(step)) is not None:
                    self.save(generation, step)

    def save(self, generation: Generation, step: int) -> None:
        number, rank = generation.number, self.ranks.rank
        at = self.folder / f"step-{step}-{generation.token}"
        try:
            at.mkdir(exist_ok=True)
            (at / f"shard-{rank}").write_text(f"{step}\n" * 1000, encoding="ascii")
            parts = self.agreement.gather(number, "shard", json.dumps({"rank": rank, "step": step}).encode())
            digest = ""
            if rank == 0:
                digest = f"sha256:{generation.token * 8}"
                unborn = at / ".manifest"
                unborn.write_bytes(b"[" + b",".join(parts) + b"]")
                unborn.rename(at / "manifest")
            self.agreement.conclude(number, ok=True, digest=digest)
        except GenerationOverError:
            return
        except OSError as error:
            self.agreement.conclude(number, ok=False, error=str(error))
