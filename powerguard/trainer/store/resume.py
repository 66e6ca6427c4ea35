"""What a training starts from: the checkpoint committed last that every rank can read to the last byte, in any tier.

Every rank reports what it can see; rank 0 finds what all of them can, the one committed last first; all try the first
of these, verifying while they read; when all have it, it is taken, else all try the next. A copy that cannot be read is
replaced by the same checkpoint from the next tier before an older one is thought of, and a single bad chunk by that
chunk from the next tier. A rotten checkpoint is set aside, reported and counted; none is deleted here.

Training never starts again at 0 because a read failed: that is an error, and says what would be right.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock, Timer
from typing import Any, Final

from powerguard.fields import clean_text
from powerguard.trainer.log import log
from powerguard.trainer.ranks.base import Ranks, boottime_s
from powerguard.trainer.store.folders import BAD, Found
from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.manifest import ManifestError, Shard, StoreError, committed_ms
from powerguard.trainer.store.shards import READERS, CorruptError, ShardReader, Snapshot, held, over_chunks
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers.base import Kind, Source, Tier, TierError, items_in, list_ranks
from powerguard.trainer.tiers.transfer import Gate

_PATIENCE_S: Final = 120.0
_LOG_EVERY_S: Final = 10.0
_LOOK_S: Final = 600.0
_LOAD_S: Final = 6 * 3600.0
_CONNECTIONS: Final = 8
_MAX_REASON: Final = 400


class ResumeError(StoreError):
    """There are checkpoints, or there may be, and none can be taken: why, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What all ranks take. items: this rank's, verified, views of the memory that was handed in (or of its own).

    tiers: where this rank's bytes came from, the main one first. repaired: chunks that came from another tier than the
    rest, and were mended on the local disk where that could be written. refused: what was passed over, and why.
    local: every byte of every rank came from its local disk, and so has just been verified there. newest_ms: the newest
    commit that any rank saw in any tier.
    """

    found: Found
    items: Mapping[str, Loaded]
    tiers: tuple[str, ...]
    repaired: int = 0
    refused: tuple[str, ...] = ()
    local: bool = False
    newest_ms: int = 0

    @property
    def step(self) -> int:
        return self.found.step


class LocalTier:
    """The job's own store as the first of the tiers."""

    word = "local"

    def __init__(self, store: Store) -> None:
        self.store = store

    def found(self) -> list[Found]:
        return self.store.found()

    def open_shard(self, found: Found, shard: Shard) -> Source:
        return ShardReader(Path(found.path), shard)

    def set_aside(self, found: Found, reason: str) -> None:
        """Rename it to bad-...; of the ranks that share the root only the leader does."""
        if self.store.leader:
            self.store.set_aside(found, reason)

    def aside(self) -> list[str]:
        return [entry.name for entry in self.store.root.iterdir() if entry.name.startswith(BAD)]

    def mend(self, found: Found, shard: Shard, index: int, content: memoryview) -> None:
        """Write one verified chunk over a rotten one, flush it, and see that it reads back. A cut leaves it as bad."""
        path = Path(found.path, shard.file)
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], index * shard.chunk_bytes + done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with ShardReader(path.parent, shard) as file:
            file.read_chunk(index, Snapshot(len(content)).buffer[: len(content)])


@dataclass(frozen=True, slots=True)
class _Candidate:
    step: int
    digest: str
    error: str


@dataclass
class _Report:
    """How one rank fared with one candidate.

    local: all that it loaded came from the local disk. corrupt: the tiers whose copies are rotten beyond repair from
    another. fatal: why this rank comes no further (out of memory, say), so that the others do not wait for it.
    """

    rank: int
    host: int
    loaded: bool = False
    local: bool = False
    corrupt: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    fatal: str = ""


def choose(
    tiers: Sequence[Tier],
    ranks: Ranks,
    *,
    job: str,
    step: int | None = None,
    into: Snapshot | None = None,
    key: str = "resume",
    patience_s: float = _PATIENCE_S,
    look_s: float = _LOOK_S,
    load_s: float = _LOAD_S,
) -> Chosen | None:
    """Load the newest checkpoint that all ranks can read. None: there is none in any tier, so training begins.

    Called by every rank, once for each key. tiers: fastest first, the local one (`LocalTier`) before all; the same
    kinds on every rank. step: of this step and no other, the same on every rank; ResumeError if there is none.
    into: memory to read into, where there is some. patience_s: how long a tier that fails is
    tried again. look_s, load_s: how long ranks wait for each other, to look and to load. Raises ResumeError, the same
    on all ranks, and RanksError.
    """
    memory = into or Snapshot()
    return _Choice(tiers, ranks, job=job, step=step, memory=memory, key=key, patience_s=patience_s).run(look_s, load_s)


class _Choice:
    def __init__(
        self,
        tiers: Sequence[Tier],
        ranks: Ranks,
        *,
        job: str,
        step: int | None,
        memory: Snapshot,
        key: str,
        patience_s: float,
    ) -> None:
        self._tiers = tiers
        self._ranks = ranks
        self._job = job
        self._step = step
        self._memory = memory
        self._key = key
        self._patience_s = patience_s
        self._gates = {tier.word: Gate(patience_s=patience_s) for tier in tiers}
        self._copies: dict[tuple[int, str], list[tuple[Tier, Found]]] = {}
        self._troubles: list[str] = []
        self._refused: list[str] = []
        self._newest_ms = 0

    def run(self, look_s: float, load_s: float) -> Chosen | None:
        candidates = self._agreed(look_s)
        for turn, candidate in enumerate(candidates):
            if candidate.error:
                raise ResumeError(candidate.error)
            report = _Report(self._ranks.rank, self._ranks.host)
            try:
                chosen = self._tried(candidate, report)
            except BaseException as error:
                report.fatal = clean_text(f"{type(error).__name__}: {error}", _MAX_REASON)
                self._send_report(turn, report)
                raise
            bad, local = self._exchanged(turn, report, load_s)
            if not bad and chosen is not None:
                self._warn_of_elsewhere(chosen)
                self._tidy()
                return replace(chosen, local=local, newest_ms=self._newest_ms)
            self._pass_over(candidate, bad)
        if candidates:
            refused = "; ".join(self._refused[-4:])
            msg = (
                f"none of the checkpoints could be read by all ranks: {refused}. To start from step 0, move the"
                " checkpoints away"
            )
            raise ResumeError(msg)
        return None

    # --- Who can see what ------------------------------------------------------------------------------------------

    def _agreed(self, look_s: float) -> list[_Candidate]:
        """The checkpoints that all ranks can see, the one committed last first, as rank 0 publishes it."""
        ranks = self._ranks
        ranks.set(f"{self._key}/see/{ranks.rank}", json.dumps(self._seen()).encode())
        if ranks.rank == 0:
            views = [json.loads(self._awaited(f"see/{rank}", look_s, rank)) for rank in range(ranks.size)]
            candidates = [[each.step, each.digest, each.error] for each in self._common(views)]
            newest_ms = max(view["newest_ms"] for view in views)
            ranks.set(
                f"{self._key}/candidates", json.dumps({"newest_ms": newest_ms, "candidates": candidates}).encode()
            )
        answer = json.loads(self._awaited("candidates", look_s + 30.0, 0))
        self._newest_ms = answer["newest_ms"]
        return [_Candidate(step, digest, error) for step, digest, error in answer["candidates"]]

    def _seen(self) -> dict[str, Any]:
        """Look into every tier; say what is there and what could not be looked at."""
        aside: list[str] = []
        for tier in self._tiers:
            try:
                with _warned_if_slow(tier.word, self._patience_s):
                    for found in self._gates[tier.word].call(tier.found):
                        self._copies.setdefault((found.step, found.digest), []).append((tier, found))
                    aside += self._gates[tier.word].call(tier.aside)
                for each in tier.store.refused() if isinstance(tier, LocalTier) else ():
                    if each.rotten:
                        self._refused.append(f"{each.name}: {each.reason}")
                    else:  # it may be good
                        self._trouble(f"{tier.word}: {each.reason}")
            except (TierError, StoreError, OSError) as error:
                self._trouble(f"{tier.word}: {error}")
        have: list[tuple[int, int, str, str, int]] = []
        for (step, digest), copies in self._copies.items():
            manifest = copies[0][1].manifest
            have.append((step, committed_ms(manifest.created), digest, manifest.job, manifest.ranks))
        newest_ms = max((at_ms for _, at_ms, *_ in have), default=0)
        steps = sorted({each[0] for each in have})
        wanted = [each for each in have if self._step in (None, each[0])]
        troubles = self._troubles + self._refused[:4]
        return {"have": wanted, "steps": steps, "newest_ms": newest_ms, "troubles": troubles, "aside": len(aside)}

    def _common(self, views: list[dict[str, Any]]) -> list[_Candidate]:
        """What every rank sees, committed last first; an error in place of one that must not be taken."""
        sets = [{(at_ms, step, digest) for step, at_ms, digest, _, _ in view["have"]} for view in views]
        worlds = {digest: (job, size) for view in views for _, _, digest, job, size in view["have"]}
        candidates = []
        for _, step, digest in sorted(set.intersection(*sets), reverse=True):
            job, size = worlds[digest]
            error, where = "", self._copies[step, digest][0][1].path
            if job != self._job:
                error = (
                    f"{where}: the checkpoint of step {step} belongs to the job {clean_text(job, 128)!r}, not to "
                    f"{self._job!r} (give each job its own folder; a renamed job goes on under its old name)"
                )
            elif size != self._ranks.size:
                error = (
                    f"{where}: the checkpoint of step {step} was made by {size} ranks, and this training has"
                    f" {self._ranks.size} (start it with {size}, or from a format that can be resharded)"
                )
            candidates.append(_Candidate(step, digest, error))
        if not candidates:
            error = _why_none(sets, views)
            if self._step is not None and not any(sets):
                steps = sorted({step for view in views for step in view["steps"]})
                hint = f"there are those of {', '.join(map(str, steps[-8:]))}" if steps else "there is none at all"
                error = f"no checkpoint of step {self._step}: {hint}. {error}".rstrip()
            return [_Candidate(-1, "", error)] if error else []
        return candidates

    # --- One candidate ---------------------------------------------------------------------------------------------

    def _tried(self, candidate: _Candidate, report: _Report) -> Chosen | None:
        """Load this rank's shard; None: it cannot be had, and the report says why."""
        copies = self._copies[candidate.step, candidate.digest]
        try:
            shard = copies[0][1].shard(self._ranks.rank)
        except ManifestError as error:  # the copies have one digest, so each says the same
            for tier, _ in copies:
                self._note(report, tier, error)
            return None
        with ExitStack() as stack:
            sources: list[tuple[Tier, Found, Source]] = []
            for tier, found in copies:
                try:
                    if isinstance(tier, LocalTier):  # in a roll-back, this process's own writer may prune meanwhile
                        stack.enter_context(held(Path(found.path)))
                    source = self._gates[tier.word].call(lambda t=tier, f=found: t.open_shard(f, shard))  # type: ignore[misc]
                except (TierError, StoreError, OSError) as error:
                    self._note(report, tier, error)
                    continue
                stack.enter_context(closing(source))
                sources.append((tier, found, source))
            if not sources:
                return None
            load = _Load(sources, shard, self._memory, self._gates, lambda t, e: self._note(report, t, e))
            try:
                items = load.run()
            except (TierError, StoreError, OSError):
                return None
        report.loaded = True
        report.local = load.used == {LocalTier.word}
        used = [tier.word for tier, _, _ in sources if tier.word in load.used]
        return Chosen(
            found=sources[0][1], items=items, tiers=tuple(used), repaired=load.repaired, refused=tuple(self._refused)
        )

    def _note(self, report: _Report, tier: Tier, error: Exception) -> None:
        reason = clean_text(f"{tier.word}: {error}", _MAX_REASON)
        if len(report.reasons) < 4:
            log.warning("checkpoint_unreadable rank=%d reason=%s", report.rank, reason)
            report.reasons.append(reason)
        if _is_corrupt(error) and tier.word not in report.corrupt:
            report.corrupt.append(tier.word)

    def _exchanged(self, turn: int, report: _Report, load_s: float) -> tuple[list[_Report], bool]:
        """Report how it went, and learn which ranks failed (none: all have loaded), and whether all was local."""
        self._send_report(turn, report)
        if self._ranks.rank == 0:
            answers = [
                json.loads(self._awaited(f"{turn}/report/{rank}", load_s, rank)) for rank in range(self._ranks.size)
            ]
            bad = [each for each in answers if not each["loaded"]]
            bad.sort(key=lambda each: not each["fatal"])
            self._send_result(turn, bad, local=all(each["local"] for each in answers))
        result = json.loads(self._awaited(f"{turn}/all", load_s + 30.0, 0))
        reports = [_Report(**each) for each in result["bad"]]
        if reports and reports[0].fatal:
            msg = f"rank {reports[0].rank} could not resume: {reports[0].fatal}"
            raise ResumeError(msg)
        return reports, bool(result["local"])

    def _send_report(self, turn: int, report: _Report) -> None:
        self._ranks.set(f"{self._key}/{turn}/report/{report.rank}", json.dumps(vars(report)).encode())
        if report.fatal and report.rank == 0:
            self._send_result(turn, [vars(report)], local=False)

    def _send_result(self, turn: int, bad: list[dict[str, Any]], *, local: bool) -> None:
        self._ranks.set(f"{self._key}/{turn}/all", json.dumps({"bad": bad[:200], "local": local}).encode())

    def _pass_over(self, candidate: _Candidate, bad: list[_Report]) -> None:
        """Remember why all go on to the next, and set aside the copies that are rotten."""
        first = bad[0].reasons[0] if bad and bad[0].reasons else "could not be read"
        reason = f"step {candidate.step}: rank {list_ranks([each.rank for each in bad])}: {first}"
        self._refused.append(reason)
        log.error("checkpoint_passed_over %s", reason)
        for tier, found in self._copies[candidate.step, candidate.digest]:
            local = isinstance(tier, LocalTier)
            own = [each for each in bad if (each.host == self._ranks.host if local else each.rank == self._ranks.rank)]
            if any(tier.word in each.corrupt for each in own):
                with suppress(TierError, StoreError, OSError):  # it was reported already; the next start tries again
                    self._gates[tier.word].call(lambda t=tier, f=found: t.set_aside(f, reason))  # type: ignore[misc]

    def _warn_of_elsewhere(self, chosen: Chosen) -> None:
        """Say it if a slower tier has a later checkpoint than this host: of another host, or of another training."""
        there = chosen.found
        copies = [each for found in self._copies.values() for each in found]
        here = [found for tier, found in copies if isinstance(tier, LocalTier) and tier.store.leader]
        newest = max(here, key=lambda each: committed_ms(each.manifest.created), default=there)
        if committed_ms(newest.manifest.created) < committed_ms(there.manifest.created):
            log.warning(
                "%s: training goes on from here, because this was committed later than what this host has (step %d). If"
                " another training has made it, stop now, and give each training a job name of its own",
                there.path,
                newest.step,
            )

    def _tidy(self) -> None:
        """Set aside what looks like a local checkpoint and is none, once there is a good one.

        Where several hosts have roots of their own, a shard that is missing here may lie there: nothing is touched.
        """
        for tier in self._tiers:
            if isinstance(tier, LocalTier) and tier.store.leader and self._ranks.hosts == 1:
                for refused in tier.store.refused():
                    if refused.rotten:
                        with suppress(StoreError, OSError):
                            tier.store.set_aside(refused, refused.reason)

    # --- Words -----------------------------------------------------------------------------------------------------

    def _trouble(self, text: str) -> None:
        text = clean_text(text, _MAX_REASON)
        self._troubles.append(text)
        log.warning("tier_unreadable %s", text)

    def _awaited(self, name: str, limit_s: float, rank: int) -> bytes:
        try:
            return self._ranks.get(f"{self._key}/{name}", limit_s)
        except TimeoutError:
            msg = f"rank {rank} did not report within {limit_s:g} s what it can read (is it alive?)"
            raise ResumeError(msg) from None


class _Load:
    """One rank's shard on its way into memory, each chunk from the first source that has it right."""

    def __init__(
        self,
        sources: Sequence[tuple[Tier, Found, Source]],
        shard: Shard,
        memory: Snapshot,
        gates: Mapping[str, Gate],
        note: Callable[[Tier, Exception], None],
    ) -> None:
        self._sources = sources
        self._shard = shard
        self._memory = memory
        self._gates = gates
        self._note = note
        self._lock = Lock()
        self.used: set[str] = set()
        self.repaired = 0

    def run(self) -> dict[str, Loaded]:
        """Raises the error of the last source for the first chunk that none has right."""
        shard = self._shard
        self._memory.reserve(shard.size_bytes, touch=False)  # the reading threads touch it, all at a time
        buffer, done, logged_at_s = self._memory.buffer, 0, boottime_s()

        def read(index: int, start: int, end: int) -> None:
            nonlocal done, logged_at_s
            self._read(index, buffer[start:end])
            with self._lock:
                done += end - start
                if boottime_s() - logged_at_s >= _LOG_EVERY_S:
                    logged_at_s = boottime_s()
                    log.info("checkpoint_read bytes=%d of=%d", done, shard.size_bytes)

        threads = READERS if isinstance(self._sources[0][0], LocalTier) else _CONNECTIONS
        try:
            over_chunks(shard.size_bytes, shard.chunk_bytes, read, threads=threads)
        except BaseException:
            self._memory.close()  # after Ctrl-C, a thread that a disk holds up may fill its part at any time
            raise
        return items_in(buffer, shard)

    def _read(self, index: int, target: memoryview) -> None:
        rotten: tuple[LocalTier, Found] | None = None
        failed: Exception = StoreError("no source")
        for number, (tier, found, source) in enumerate(self._sources):
            try:
                self._gates[tier.word].call(lambda s=source: s.read_chunk(index, target))  # type: ignore[misc]
            except (TierError, StoreError, OSError) as error:
                failed = error
                with self._lock:
                    self._note(tier, error)
                if isinstance(tier, LocalTier) and _is_corrupt(error):
                    rotten = (tier, found)
                continue
            with self._lock:
                self.used.add(tier.word)
                self.repaired += number > 0
            if rotten is not None:
                self._mend(*rotten, index, target)
            return
        raise failed

    def _mend(self, tier: LocalTier, found: Found, index: int, content: memoryview) -> None:
        try:
            tier.mend(found, self._shard, index, content)
        except (StoreError, OSError) as error:
            log.warning("chunk_not_mended file=%s/%s chunk=%d reason=%s", found.path, self._shard.file, index, error)
        else:
            log.warning("chunk_mended file=%s/%s chunk=%d", found.path, self._shard.file, index)


@contextmanager
def _warned_if_slow(word: str, patience_s: float) -> Iterator[None]:
    """Log once that a tier has not answered yet, and how long it is waited for."""
    text = "tier_slow %s: no answer for %.0f s: tried for about %.0f s, then left out"
    timer = Timer(_LOG_EVERY_S, log.warning, (text, word, _LOG_EVERY_S, max(patience_s, _LOG_EVERY_S)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_corrupt(error: Exception) -> bool:
    is_corrupt_there = isinstance(error, TierError) and error.kind is Kind.CORRUPT
    return is_corrupt_there or isinstance(error, (CorruptError, ManifestError))


def _why_none(sets: Sequence[set[tuple[int, int, str]]], views: Sequence[Mapping[str, Any]]) -> str:
    """Why no checkpoint is seen by all ranks, where that is not because there is none; "" then."""
    hint = "To start from step 0, move the checkpoints away"
    some = [rank for rank, each in enumerate(sets) if each]
    if some:
        none = [rank for rank, each in enumerate(sets) if not each] or list(range(len(sets)))
        newest = max(step for each in sets for _, step, _ in each)
        text = f"no checkpoint can be read by all ranks: rank {list_ranks(some)} can (up to step {newest}),"
        text += f" rank {list_ranks(none)} cannot read that one"
    elif any(view["troubles"] for view in views):
        text = "no checkpoint was found, but there may be some"
        hint = "Repair it; to start from step 0, move its content away, or leave out the tier that cannot be read"
    elif any(view["aside"] for view in views):
        text = "no checkpoint is left; the others were set aside as corrupt"
    else:
        return ""
    troubles = list(dict.fromkeys(trouble for view in views for trouble in view["troubles"]))[:4]
    return f"{text}{': ' if troubles else ''}{'; '.join(troubles)}. {hint}"
