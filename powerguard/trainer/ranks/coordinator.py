"""Many ranks: what is asked at one endpoint is agreed on by all ranks, and what all do is reported at each endpoint.

The requests of each process stay what its own askers see. Here they are connected with the agreement: a wish opens a
generation, or joins one; the training thread takes its state where the agreement says; a pause, its end, and the end of
the process come from the agreement too, and from nowhere else. Nothing here holds the lock of the requests while it
asks the store of the ranks.
"""

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from powerguard.fields import clean_text
from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import WriteAbandoned, attempted, commit_time
from powerguard.trainer.loop.requests import Operation, RequestQueue
from powerguard.trainer.loop.writer import PERIODIC, Writer
from powerguard.trainer.ranks.agreement import Agreement, GenerationOverError
from powerguard.trainer.ranks.base import Flag, Ranks, RanksError
from powerguard.trainer.ranks.machine import Ended, Generation
from powerguard.trainer.ranks.replica import Processes, SharedParts
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import HOST_LEFT, After, Phase, Reason, TriggerRequest

_SAVE_S = 1800.0  # how long a save at the end of training waits for the slowest rank
_WORDS_S = (10.0, 60.0)
"""After how long such a save names the ranks that it waits for."""
_GLANCE_S = 0.02
_SETTLED_S = 5.0
_LOOK_S = 0.5
"""How soon a signal is passed on, and a lease that is over is seen."""
_FORCE_S = 1.5
"""After a host has left: time for a training thread to come to a step boundary."""
_FAREWELL_S = 0.3
"""The same for rank 0 to wait for the others, which may read its store; those of the host that left never answer."""
_LAST_S = 30.0
"""The same for its process to end by itself after StopTraining."""


class NotCommittedError(Exception):
    """The checkpoint came to nothing on some rank: which, and why."""


class RankCoordinator:
    """Connects one rank's requests and writer with the agreement of all ranks; see `requests.RankRequests`."""

    def __init__(self, requests: RequestQueue, writer: Writer, ranks: Ranks) -> None:
        self._requests = requests
        self._writer = writer
        self._ranks = ranks
        self._periodic = False
        self._saves = 0
        self._save_parts = SharedParts()
        self._awaited = ""
        requests.others = self
        self._wishes = threading.Thread(target=self._pass_on, name="powerguard-wishes", daemon=True)
        self._end_by_force: threading.Thread | None = None
        self._is_main = threading.current_thread() is threading.main_thread()
        self._is_ending = self._is_over = False
        self._begun = threading.Event()
        self.agreement = Agreement(ranks, clock=requests.clock, changed=self._changed)
        self._begun.set()
        self.news()

    def start(self) -> Agreement:
        """Begin to pass on what the training thread cannot wait for; return what all ranks agree by."""
        self._wishes.start()
        return self.agreement

    # --- Wishes, in a server's thread or one of their own -----------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Training is to stand for this host, as all ranks know."""
        return self.agreement.state.held_by(self._ranks.host) is not After.CONTINUE

    @property
    def hosts_holding(self) -> int | None:
        """How many hosts want that; None where there is one."""
        return len(self.agreement.state.holds) if self._ranks.hosts > 1 else None

    @property
    def held_by(self) -> tuple[str, ...]:
        """The names of the other hosts that want that."""
        hosts = (host for host, _ in self.agreement.state.holds if 0 <= host < self._ranks.hosts)
        return tuple(self._ranks.names[host] for host in hosts if host != self._ranks.host)

    @property
    def calls_the_roll(self) -> bool:
        """No host wants training to stand any more, and all ranks are asked whether they are there.

        Also just after, while `news` has not passed on yet that training goes on.
        """
        state = self.agreement.state
        if state.front is not None:
            return state.front.rolls
        return self._requests.held and state.held_at is None and not self.agreement.lost

    @property
    def trouble(self) -> str:
        """What is wrong between the ranks, for a person; "" while nothing is."""
        return self.agreement.trouble or self._awaited

    def opened(self, request: TriggerRequest) -> int:
        """Have all ranks save. Raises RanksError."""
        return self.agreement.open(request).number

    def cancelled(self, number: int) -> None:
        """Call a generation off."""
        self.agreement.cancel(number)
        self.news()

    def rotted(self, digest: str) -> None:
        """Have no request answered with what all ranks have saved last, and no rank report it. Raises RanksError."""
        self.agreement.go_back(digest)

    def paused(self) -> None:
        """Have all ranks stand still at one step."""
        self.agreement.open(TriggerRequest(id=f"pause-{secrets.token_hex(6)}", after=After.PAUSE), save=False)

    def resumed(self, *, all_hosts: bool = False, may_leave: bool = False) -> None:
        """Take back what this host wanted, or what all of them did; all ranks go on, if no host holds them any more.

        may_leave: as in `Agreement.resume`.
        """
        self.agreement.resume(all_hosts=all_hosts, may_leave=may_leave)
        self.news()

    def departs(self, because: str) -> None:
        """Have all ranks stop at one step and end: this host leaves the job."""
        name = self._ranks.names[self._ranks.host] or "its host"
        self.agreement.depart(f"{name} has left the job: {because or 'it powers off'}")

    def due(self) -> None:
        """A periodic checkpoint is due: asked for in another thread, so that training need not wait."""
        with self._requests.lock:
            self._periodic = True
            self._requests.changed.notify_all()

    def _pass_on(self) -> None:
        """Not in the writer's thread: a write in its middle would hold a signal up, and with it the newer state."""
        requests = self._requests
        while not self._is_over:
            attempted(self.tick, "asking the other ranks")
            with requests.changed:
                if not (self._periodic or self._is_over):
                    requests.changed.wait(_LOOK_S if requests.signals or requests.lease is not None else None)

    def tick(self) -> None:
        """Ask for what is due; let a pause go whose lease is over; pass a signal on."""
        requests = self._requests
        if self._periodic:
            self._periodic = False
            name = f"{PERIODIC}-{secrets.token_hex(6)}"
            try:
                self.agreement.open(TriggerRequest(id=name, reason=Reason.PERIODIC))
            except RanksError as error:
                log.warning("no periodic checkpoint: %s", error)
        with requests.changed:
            lapsed = requests.lease is not None and requests.lease.left_s(requests.clock()) <= 0
            signalled, request = requests.signalled, requests.signal_request()
            must_end = requests.ending is not None and requests.ending.must_end and requests.held
        if request is not None:
            self._open_to_end(request, signalled)
        if lapsed or must_end:
            self.resumed(all_hosts=must_end, may_leave=True)

    def _open_to_end(self, request: TriggerRequest, signalled: int | None) -> None:
        """Have all ranks save, and then end. A rank that has lost the others ends without. Raises RanksError."""
        number, failed = None, None
        try:
            number = self.agreement.open(request).number
        except RanksError as error:
            if not self.agreement.lost:
                self._requests.signalled = signalled  # asked again at the next tick
                raise
            failed = error
        with self._requests.changed:
            operation = self._requests.open(request, After.EXIT, "", number)
            operation.must_end = True
            if failed is not None and not operation.ended:
                self._requests.settle(operation, failed)

    # --- What all ranks do, in the watcher's thread ------------------------------------------------------------------

    def _changed(self) -> None:
        """Take news from the watcher, which may have news before its agreement has a name here."""
        if self._begun.is_set():
            self.news()

    def news(self) -> None:
        """Bring the requests up to date."""
        requests = self._requests
        with requests.changed:
            state = self.agreement.state  # read with the lock held: older than the last wish that was noted it is not
            front = state.front
            stands = front is not None and front.begun and front.after is not After.CONTINUE
            requests.held = (state.held_at is not None or stands) and not self.agreement.lost
            if not self.holds or self.agreement.lost:
                requests.holds, requests.lease = False, None
            if requests.last is not None and state.rotten and requests.last.manifest_digest == state.rotten:
                requests.last = None
            for known in (*state.past, state.back, front):
                if known is not None:
                    self._reconcile(self._as_seen(known))
            requests.departed = self.agreement.departed
            if requests.departed and self._is_main and self._end_by_force is None:
                self._end_by_force = threading.Thread(target=self._force, name="powerguard-departed", daemon=True)
                self._end_by_force.start()
            requests.changed.notify_all()

    def _as_seen(self, known: Generation) -> Generation:
        """Return a generation as over if this rank has lost the others: it will never learn how it ended.

        Without the agreement's lock, which a thread may hold that waits for the lock of the requests.
        """
        lost = self.agreement.lost
        if known.ended is not None or not lost or self._is_over:
            return known
        return replace(known, ended=Ended(ok=False, lost=True, error=clean_text(lost)))

    def _force(self) -> None:
        """End the process of a training thread that comes to no boundary: it hangs in a collective of a host that left.

        A thread that stands for the checkpoint that is being written is waited for, and so is what training does after
        StopTraining, for a while: its own last collectives may hang, too.
        """
        until_s = self._requests.clock() + _FORCE_S
        while (now_s := self._requests.clock()) < until_s:
            time.sleep(_GLANCE_S)
            front = self.agreement.state.front
            if front is not None and front.begun and self.agreement.standing is not None and not self.agreement.lost:
                until_s = max(until_s, now_s + _FORCE_S)
            if self._is_ending:
                until_s, self._is_ending = now_s + _LAST_S, False
        log.error("training came to no step: %s; this process ends with status %d", self.agreement.departed, HOST_LEFT)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(HOST_LEFT)

    def ends(self) -> None:
        """Note that the training thread has come to a boundary and ends."""
        self._is_ending = True
        self._ranks.farewell_s = _FAREWELL_S

    def _reconcile(self, known: Generation) -> None:
        """Report one generation, from whichever host the request came."""
        requests = self._requests
        operation = requests.of_generation(known.number)
        if operation is None:
            if known.ended is None and known.save and known.reason != PERIODIC:
                self._adopt(known)
            return
        if known.ended is None:
            operation.after = known.after
            operation.hosts_on_battery = len(known.on_battery) if self._ranks.hosts > 1 else None
            operation.deadline_at_s = self.agreement.deadline_at_s(known.number)
            if operation.phase is Phase.WAITING_STEP:
                operation.phase = Phase.AGREEING
            operation.step = known.step if operation.began_s is None else operation.step
        elif not known.ended.ok:
            self._writer.call_off(known.number)
            over = NotCommittedError(known.ended.error)
            requests.settle(operation, WriteAbandoned(known.ended.error) if known.ended.aborted else over)
        elif operation.began_s is None and known.step is not None:
            # Joined just as it ended: the writer's thread may not have reported it here yet, and knows an older one.
            operation.step = known.step
            requests.settle(operation, self._durable(known.step, known.ended.digest))

    def _adopt(self, known: Generation) -> Operation:
        """Know of a checkpoint that was asked for at another host's endpoint."""
        reasons = {word.value: word for word in Reason}
        reason = reasons.get(known.reason, Reason.OTHER)
        request = TriggerRequest(id=known.ids[0], reason=reason, after=known.after, event=known.event)
        return self._requests.open(request, known.after, "", known.number)

    # --- The training thread -----------------------------------------------------------------------------------------

    def claim(self, known: Generation, step: int) -> Operation | None:
        """Begin this rank's part of a generation; None: only the clock asked for it. With the lock held."""
        requests = self._requests
        operation = requests.of_generation(known.number)
        if operation is None and known.reason != PERIODIC:
            operation = self._adopt(known)
        if operation is not None and operation.ended:
            operation = None  # the generation is over, or this name has gone on to a newer one, and its asker knows
        if operation is not None:
            operation.step = step
            operation.began_s = requests.clock()
            operation.phase = Phase.SNAPSHOT
            requests.held = requests.held or operation.stands
            requests.changed.notify_all()
        return operation

    def already(self, known: Generation, step: int) -> SavedCheckpoint:
        """Return the checkpoint of this very step that is durable already. With the lock held.

        By its digest: there may be two of one step, and the newest that this rank knows of may be the other one.
        """
        return self._durable(step, known.already)

    def _durable(self, step: int, digest: str) -> SavedCheckpoint:
        last = self._requests.last
        if last is not None and last.manifest_digest == digest:
            return last
        return SavedCheckpoint(step=step, path="", size_bytes=0, manifest_digest=digest)

    def last_of(self, known: Generation) -> Operation:
        """Return the operation after which the process is to end: it is durable for all. With the lock held."""
        requests = self._requests
        own = requests.of_generation(known.number)
        if own is not None:
            requests.changed.wait_for(lambda: own.ended, timeout=_SETTLED_S)  # the writer's thread is about to say so
        return (
            own or requests.known_as(known.ids) or Operation(id=known.ids[0], after=After.EXIT, phase=Phase.COMMITTED)
        )

    def cut_off(self, cut: Exception, *, beyond: int) -> None:
        """Stand nowhere any more; end for all ranks what this one takes part in, if that is newer than `beyond`."""
        known = self.agreement.leave()
        if known is None or known.number <= beyond:
            return
        error = f"{type(cut).__name__}: {cut}"
        ended = known.ended or self.agreement.conclude(known.number, ok=False, error=error).ended
        with self._requests.lock:
            operation = self._requests.of_generation(known.number)
            if operation is not None and ended is not None:
                durable = self._durable(known.step or 0, ended.digest)
                self._requests.settle(operation, durable if ended.ok else NotCommittedError(ended.error))

    def part(self, known: Generation) -> "Part":
        """Return this rank's part in a generation, for the writer."""
        return Part(self.agreement, known)

    def together(self, step: int) -> "Collective":
        """Return a save that every rank calls for by itself, at the same step. Raises NotCommittedError."""
        self._saves += 1
        ranks = self._ranks.clone()
        return Collective(ranks, self._saves, step, self._save_parts, _SAVE_S, note_awaited=self._note_awaited)

    def _note_awaited(self, awaited: str) -> None:
        """Show, and log, for which ranks a save waits; "" for none any more."""
        self._awaited = awaited
        if awaited:
            log.warning("%s", awaited)

    def stand_in(self, step: int, take_part: Callable[[Generation], None]) -> "StandIn":
        """Have a stand-in wait at this boundary while the training thread is busy elsewhere."""
        return StandIn(self.agreement, step, take_part)

    def close(self) -> None:
        """Say that this rank's training has ended."""
        with self._requests.changed:
            self._is_over = True
            self._requests.changed.notify_all()
        self.agreement.close()
        if self._wishes.is_alive():
            self._wishes.join(_LOOK_S)


class StandIn:
    """Stands at the last boundary for the training thread while that is in a phase with a state.

    To the others the boundary is still ahead of this rank, so that it can be agreed on; what is saved there is the copy
    in memory. Training itself goes on evaluating, and stands at its next poll or at the end of the phase.
    """

    def __init__(self, agreement: Agreement, step: int, take_part: Callable[[Generation], None]) -> None:
        self._agreement = agreement
        self._step = step
        self._take_part = take_part
        self._over = Flag()
        self.leaving: Generation | None = None
        """Durable, and every rank is to end."""
        agreement.step = step - 1
        self._thread = threading.Thread(target=self._run, name="powerguard-stand-in", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_over = False
        while not is_over and self.leaving is None:
            is_over = self._over.wait(_GLANCE_S)
            if is_over:
                # From here on this boundary lies behind, and others may be bid. Was it bid before, it is due below.
                self._agreement.step = self._step
            if self._step < self._agreement.due:
                continue
            while (known := self._agreement.wait(self._step)) is not None:
                if known.ended is not None:
                    self.leaving = known
                    break
                self._take_part(known)

    def relieved(self, within_s: float) -> bool:
        """Say that the training thread is back; True once it may take over, which is when no caller holds training."""
        self._over.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        self._agreement.step = self._step
        return True


class Part:
    """One rank's part in one generation; see `checkpointer.OtherRanks`."""

    def __init__(self, agreement: Agreement, known: Generation) -> None:
        self._agreement = agreement
        self.number: int | None = known.number
        self._number = known.number
        self.token = known.token
        self.created = ""

    @property
    def is_asked(self) -> bool | None:
        """Whether a request is among its askers, in what all ranks have read."""
        known = self._agreement.generation(self._number)
        return known is not None and not all(name.startswith(f"{PERIODIC}-") for name in known.ids)

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """Hand in this rank's shard, and rank 0's time of day with it. Raises NotCommittedError."""
        try:
            values = self._agreement.gather(self._number, "shard", _stamped(shard, after_ms), read=read)
        except GenerationOverError as over:
            raise NotCommittedError(str(over)) from None
        self.created, shards = _unstamped(values)
        return shards

    def failed(self, error: Exception) -> None:
        """End the generation for all."""
        self._agreement.conclude(self._number, ok=False, error=f"{type(error).__name__}: {error}")

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Wait until all ranks are done. Raises NotCommittedError."""
        ended = self._agreement.conclude(self._number, ok=True, digest=saved.manifest_digest).ended
        if ended is None or not ended.ok:
            raise NotCommittedError("" if ended is None else ended.error)
        return replace(saved, manifest_digest=ended.digest)


class Collective:
    """A save that every rank calls for by itself, as at the end of training: no agreement on a step is needed.

    ranks: a connection of its own, let go of when the save has ended. parts: the same for all saves of a rank.
    note_awaited: called with the ranks that it waits for, in words, after each of words_s, and with "" after that.
    Raises NotCommittedError, on every rank, if they are not all at this step.
    """

    number: int | None = None
    is_asked: bool | None = False

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        step: int,
        parts: SharedParts,
        limit_s: float,
        *,
        note_awaited: Callable[[str], None] = lambda _awaited: None,
        words_s: tuple[float, ...] = _WORDS_S,
    ) -> None:
        self._ranks = ranks
        self._words_s = words_s
        self._processes = Processes()
        self._note_awaited = note_awaited
        self._number = -number  # generations count upwards from 1
        self._limit_s = limit_s
        self._parts = parts
        self.created = ""
        try:
            self.token = self._met(step)
        except BaseException:
            ranks.close()
            raise

    def _met(self, step: int) -> str:
        """Wait until all ranks are here, and return the token of rank 0."""
        answers = [value.decode().split() for value in self._all("token", f"{secrets.token_hex(4)} {step}".encode())]
        # All have come to this one: no rank reads the ones before any more.
        self._parts.forget(self._ranks, keep={self._number}, before=0)
        token, first = answers[0]
        for rank, (_, its) in enumerate(answers):
            if its != first:
                both = f"rank 0 called guard.save for step {first}, rank {rank} for step {its}"
                msg = f"{both}: nothing was saved (call it for the same step on every rank)"
                raise NotCommittedError(msg)
        return token

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """Wait for all shards. Raises NotCommittedError."""
        self.created, shards = _unstamped(self._all("shard", _stamped(shard, after_ms)))
        return shards if read else []

    def failed(self, error: Exception) -> None:
        """Inform the other ranks."""
        with closing(self._ranks):
            reason = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
            self._ranks.set(self._failure, reason[:500].encode("ascii", "replace"))

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Wait until all are done. Raises NotCommittedError."""
        with closing(self._ranks):
            digests = {digest for digest in self._all("done", saved.manifest_digest.encode()) if digest}
        if len(digests) != 1:
            msg = f"{len(digests)} manifests, not one"
            raise NotCommittedError(msg)
        return replace(saved, manifest_digest=digests.pop().decode())

    @property
    def _failure(self) -> str:
        return f"g/{self._number}/failure"

    def _all(self, what: str, value: bytes) -> list[bytes]:
        try:
            self._parts.hand_in(self._ranks, self._number, what, value)
            self._await(what)
            return self._parts.fetch(self._ranks, self._number, what)
        except (RanksError, TimeoutError) as error:
            msg = f"the other ranks cannot be asked: {error}"
            raise NotCommittedError(msg) from error
        finally:
            self._note_awaited("")

    def _await(self, what: str) -> None:
        """Wait for the parts of all ranks, one after the other. Raises NotCommittedError, RanksError."""
        ranks, began_s, reminders_s, rank = self._ranks, time.perf_counter(), list(self._words_s), 0
        while rank < ranks.size:
            if self._parts.has(ranks, self._number, what, rank):
                rank += 1
                continue
            if ranks.check(self._failure):
                raise NotCommittedError(ranks.get(self._failure, 0.0).decode())
            if self._processes.has_ended(ranks, rank) and not self._parts.has(ranks, self._number, what, rank):
                msg = f"rank {rank} has died"
                raise NotCommittedError(msg)
            waited_s = time.perf_counter() - began_s
            if waited_s > min([self._limit_s, *reminders_s[:1]]):
                missing = self._parts.missing(ranks, self._number, what)
                problem = f"guard.save has waited {waited_s:.0f} s for rank {', '.join(map(str, missing[:8]))}"
                problem += f"{' ...' if missing[8:] else ''} (does every rank save here, and is its process alive?)"
                if waited_s > self._limit_s:
                    raise NotCommittedError(problem)
                self._note_awaited(problem)
                reminders_s.pop(0)
            time.sleep(_GLANCE_S)


def _stamped(shard: bytes, after_ms: int) -> bytes:
    return commit_time(after_ms).encode() + b" " + shard


def _unstamped(values: list[bytes]) -> tuple[str, list[bytes]]:
    """Return rank 0's time of day and all shards: where every host has a root, their manifests must be the same."""
    split = [value.partition(b" ") for value in values]
    return (split[0][0].decode() if split else ""), [shard for _, _, shard in split]
