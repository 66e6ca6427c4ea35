"""powerguard-gpu: the root helper that lowers GPU power limits and puts them back. It has no other function.

systemd starts one process for each connection to powerguard-gpu.socket, which only user powerguard can open. It reads
one JSON line, answers with one, and ends. The words are a closed list:

    {"word": "list"}                  list the GPUs; no change
    {"word": "health"}                which GPUs are there, and which need a reset; no change
    {"word": "cap", "share": 0.6}     each limit to this share of the limit found; never above what is set now
    {"word": "restore"}               each limit back to what was found, where it still is what we have set
    {"word": "hold"}                  the daemon is there and wants the cap to stay

People call it as root, with the same words: `powerguard-gpu list`. Only the standard library and nvidia-ml-py are
imported. A late answer of NVML is reported and not waited for: this process ends in spite of its threads.

What powerguard-gpu found before it changed anything: one small file, written before the first limit is lowered.

It lies in /run and names the boot: power limits do not survive a reboot, and neither does the file. Each entry holds
the limit found, which is never overwritten, and every limit that we may have set since: even after a kill at any
    instruction, the GPU reads one of these, unless another program has set another limit.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from powerguard.clock import boottime_s
from powerguard.effectors.gpu.nvml import SAME_MW, Gpu, GpuHealth, Nvml, NvmlError, may_set_limits
from powerguard.effectors.root_helper import (
    EX_USAGE,
    Answer,
    BootFolder,
    KeptError,
    RefusedError,
    by_hand,
    log_line,
    past_s,
    refuse_under_test,
    seconds,
    serve,
    wait_until_due,
)

LEASE_S: Final = 180.0
"""A cap holds this long after the daemon last said so: longer than its restart (20 s to stop, 60 s to start)."""

RETRY_S: Final = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Time from a restore order that failed to the helper's own first attempt, and to each further one."""

REMEMBERED: Final = 8
"""Limits of ours that are remembered for each GPU, the newest: one for each share that was asked for."""

LIMITS: Final = "limits.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimit:
    """One GPU whose limit we may have changed. gone: it was not there when its limit was to be put back."""

    uuid: str
    index: int
    name: str
    found_mw: int
    set_mw: tuple[int, ...]
    gone: bool = False

    def is_ours(self, limit_mw: int) -> bool:
        """Say whether a limit is one that we have set."""
        return any(abs(limit_mw - ours_mw) < SAME_MW for ours_mw in self.set_mw)

    def is_found(self, limit_mw: int) -> bool:
        """Say whether a limit is the one found."""
        return abs(limit_mw - self.found_mw) < SAME_MW


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    """The limits on file. Times are seconds of CLOCK_BOOTTIME, 0 for never.

    capped_s: when GPUs were last capped. ordered_s: when they were to be restored: from then on no cap is wanted.
    tries: restores that the watch began, unasked; tried_s: the last of them.
    """

    capped_s: float
    ordered_s: float = 0.0
    tries: int = 0
    tried_s: float = 0.0
    gpus: tuple[KeptLimit, ...] = ()

    def due_s(self, held_s: float, lease_s: float) -> float:
        """When the watch is to put the limits back: the daemon is gone, or its restore order has failed."""
        if self.ordered_s:
            return max(self.ordered_s, self.tried_s) + RETRY_S[min(self.tries, len(RETRY_S) - 1)]
        return max(self.capped_s, held_s) + lease_s


class GpuFolder(BootFolder):
    """The helper's own folder: /run/powerguard-gpu, or a test's."""

    def __init__(self, path: Path) -> None:
        by_hand = "set the limits by hand (nvidia-smi --power-limit)"
        super().__init__(path, helper="powerguard-gpu", file=LIMITS, by_hand=by_hand)

    def read(self) -> KeptLimits | None:
        """The limits on file; None if there are none. Raises KeptError."""
        content = self.load()
        try:
            return None if content is None else _limits(content)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self.nonsense() from None

    def write(self, limits: KeptLimits) -> None:
        """Keep it, durably and whole: a kill at any instruction leaves the old file or the new one."""
        self.keep(asdict(limits))


def _limits(content: dict[str, Any]) -> KeptLimits:
    """Read the file strictly. Raises ValueError, KeyError, TypeError or AttributeError."""
    times = {name: past_s(content[name]) for name in ("capped_s", "ordered_s", "tried_s")}
    gpus = tuple(
        KeptLimit(
            uuid=str(gpu["uuid"]),
            index=int(gpu["index"]),
            name=str(gpu["name"]),
            found_mw=int(gpu["found_mw"]),
            set_mw=tuple(int(limit) for limit in gpu["set_mw"]),
            gone=gpu["gone"] is True,
        )
        for gpu in content["gpus"]
    )
    if any(gpu.found_mw <= 0 for gpu in gpus):
        raise ValueError(gpus)
    return KeptLimits(**times, tries=int(content["tries"]), gpus=gpus)


FOLDER: Final = "/run/powerguard-gpu"
WITHIN_S: Final = 4.0
"""Timeout for an answer. The caller waits 4.75 s; NVML takes 0.1 s, more if the driver must wake its GPUs first."""

HEALTH_S: Final = 16.0
"""The same for health, which only the start of training waits for. After a boot no program uses a GPU yet, and without
persistence mode the driver must wake each one, for 1 to 3 s (NVIDIA's "Driver Persistence"); then it sleeps again."""

UNASKED_S: Final = 75.0
"""Timeout for the watch, which has no caller."""

TURN_SHARE: Final = 0.25
LOOK_SHARE: Final = 0.7
"""Shares of the time for an answer: to get the lock, and to look at all GPUs; the rest is for setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """One request. share: for cap only. within_s: for the answer. unasked: it is the watch that restores."""

    word: str
    share: float = 1.0
    within_s: float = WITHIN_S
    unasked: bool = False


# --- The words ------------------------------------------------------------------------------------------------------


def do_list(folder: GpuFolder, word: GpuRequest) -> Answer:
    """List the GPUs; make no change."""
    by_s = boottime_s() + LOOK_SHARE * word.within_s
    kept = folder.read()
    nvml = Nvml.open(by_s)
    may_set = may_set_limits()
    gpus = [_listed(index, gpu, may_set=may_set) for index, gpu in sorted(nvml.look(by_s).items())]
    capped_s = None if kept is None else round(boottime_s() - kept.capped_s, 1)
    return {"ok": True, "capped": 0 if kept is None else len(kept.gpus), "capped_since_s": capped_s, "gpus": gpus}


def _listed(index: int, gpu: Gpu | NvmlError, *, may_set: bool) -> Answer:
    if isinstance(gpu, NvmlError):
        return {"index": index, "settable": False, "because": str(gpu)}
    because = "" if may_set else "not permitted: powerguard-gpu lacks CAP_SYS_ADMIN (in a container, or not root)"
    if gpu.min_mw >= gpu.max_mw:
        because = f"its limit cannot be changed: {_watts(gpu.min_mw):g} W is both minimum and maximum"
    return {
        "index": index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "limit_w": _watts(gpu.limit_mw),
        "default_w": None if gpu.default_mw is None else _watts(gpu.default_mw),
        "min_w": _watts(gpu.min_mw),
        "max_w": _watts(gpu.max_mw),
        "power_w": gpu.power_w,
        "utilization_pct": gpu.utilization_pct,
        "throttled": list(gpu.throttled),
        "mig": gpu.mig,
        "persistent": gpu.persistent,
        "settable": not because,
        "because": because,
    }


def do_health(_folder: GpuFolder, word: GpuRequest) -> Answer:
    """List which GPUs are there, and what is wrong with them; make no change."""
    by_s = boottime_s() + word.within_s
    seen = Nvml.open(by_s).health(by_s)
    return {"ok": True, "gpus": [_well(index, gpu) for index, gpu in sorted(seen.items())]}


def _well(index: int, gpu: GpuHealth | NvmlError) -> Answer:
    if isinstance(gpu, NvmlError):
        return {"index": index, "uuid": None, "name": None, "because": str(gpu)}
    return {
        "index": index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pending": list(gpu.pending),
        "worn": gpu.worn,
        "memory_errors": gpu.memory_errors,
        "because": "",
    }


def do_cap(folder: GpuFolder, word: GpuRequest) -> Answer:
    """Lower the limits. What was found is in the file before the first of them is touched."""
    began_s = boottime_s()
    look_by_s = began_s + LOOK_SHARE * word.within_s
    with folder.locked(began_s + TURN_SHARE * word.within_s):
        kept = folder.read() or KeptLimits(capped_s=0.0)
        nvml = Nvml.open(look_by_s)
        entries = {entry.uuid: entry for entry in kept.gpus}
        results: dict[int, Answer] = {}
        wanted: dict[int, int] = {}
        for index, gpu in sorted(nvml.look(look_by_s).items()):
            if isinstance(gpu, NvmlError):
                results[index] = {"index": index, "did": "failed", "because": str(gpu)}
                continue
            entry, results[index] = _aim(gpu, entries.get(gpu.uuid), word.share)
            if results[index]["did"] == "capped":
                wanted[index] = round(results[index]["watts_after"] * 1000)
            if entry is not None:
                entries[gpu.uuid] = entry
        if entries:
            folder.hold()
            folder.write(KeptLimits(capped_s=boottime_s(), gpus=tuple(entries.values())))
        for index, reads in nvml.set_limits(wanted, began_s + word.within_s).items():
            if isinstance(reads, NvmlError):
                results[index] |= {
                    "did": "failed",
                    "because": str(reads),
                    "watts_after": results[index]["watts_before"],
                }
    answer = _answer(results)
    if not any(gpu["did"] in {"capped", "kept"} for gpu in results.values()):
        answer |= {"ok": False, "error": _why_none(results.values())}
    return answer


def _aim(gpu: Gpu, entry: KeptLimit | None, share: float) -> tuple[KeptLimit | None, Answer]:
    """What is to be kept of a GPU, and what is to be done with it."""
    now_mw = gpu.limit_mw
    if entry is not None and not entry.is_ours(now_mw) and not entry.is_found(now_mw):
        if not entry.gone:
            because = f"another program has set {_watts(now_mw):g} W since: left alone"
            return entry, _result(gpu, "left_alone", entry.found_mw, now_mw, because)
        entry = None  # it was away and has come back with a limit of its own: that is what is found now
    found_mw = now_mw if entry is None else entry.found_mw
    # Whole watts, rounded down: drivers round fractions, and then no limit would read back as set.
    target_mw = min(now_mw, max(gpu.min_mw, int(found_mw * share) // 1000 * 1000))
    if target_mw == now_mw:
        if entry is not None and entry.is_ours(now_mw) and not entry.is_found(now_mw):
            return entry, _result(gpu, "kept", found_mw, now_mw, "is capped already")
        because = (
            f"its lowest limit is {_watts(gpu.min_mw):g} W"
            if now_mw <= gpu.min_mw
            else "its limit is not above that share"
        )
        return entry, _result(gpu, "at_minimum", found_mw, now_mw, because)
    before = () if entry is None else entry.set_mw
    ours_mw = (*(limit for limit in before if limit != target_mw), target_mw)[-REMEMBERED:]
    fresh = KeptLimit(uuid=gpu.uuid, index=gpu.index, name=gpu.name, found_mw=found_mw, set_mw=ours_mw)
    return fresh, _result(gpu, "capped", found_mw, target_mw)


def _why_none(results: Sequence[Answer] | Any) -> str:  # noqa: ANN401 - a view of a dict's values
    reasons = sorted({str(gpu["because"]) for gpu in results})
    return f"no GPU was capped: {'; '.join(reasons)}" if reasons else "no GPU was capped: NVML reports none"


def do_restore(folder: GpuFolder, word: GpuRequest) -> Answer:
    """Put back the limits found, if the present one is still ours. No effect without a file."""
    began_s = boottime_s()
    look_by_s = began_s + LOOK_SHARE * word.within_s
    with folder.locked(began_s + TURN_SHARE * word.within_s):
        kept = folder.read()
        if kept is None:
            return _answer({})
        # From here on no cap is wanted, even if this process ends: see Limits.due_s.
        kept = replace(kept, ordered_s=kept.ordered_s or began_s)
        if word.unasked:
            kept = replace(kept, tries=kept.tries + 1, tried_s=began_s)
        try:
            folder.write(kept)
        except KeptError as error:  # the limits are restored anyway, and the old file says what was found
            log_line(4, str(error))
        nvml = Nvml.open(look_by_s)
        results = _put_back(nvml, kept, nvml.look(look_by_s), began_s + word.within_s)
        left = tuple(
            replace(entry, gone=results[entry.uuid]["did"] == "gone")
            for entry in kept.gpus
            if results[entry.uuid]["did"] in {"failed", "gone"}
        )
        if left:
            folder.write(replace(kept, gpus=left))
        else:
            folder.forget()
    answer = _answer(results)
    failed = [gpu for gpu in answer["gpus"] if gpu["did"] == "failed"]
    if failed:
        text = "; ".join(f"GPU {gpu['index']}: {gpu['because']}" for gpu in failed)
        answer |= {"ok": False, "error": f"some limits are not restored, powerguard-gpu tries again: {text}"}
    return answer


def _put_back(nvml: Nvml, kept: KeptLimits, seen: Mapping[int, Gpu | NvmlError], by_s: float) -> dict[str, Answer]:
    """Put limits back and return what became of each GPU, by UUID."""
    present = {gpu.uuid: gpu for gpu in seen.values() if isinstance(gpu, Gpu)}
    silent = next((gpu for gpu in seen.values() if isinstance(gpu, NvmlError) and not gpu.lost), None)
    results: dict[str, Answer] = {}
    wanted: dict[int, KeptLimit] = {}
    for entry in kept.gpus:
        gpu = present.get(entry.uuid)
        results[entry.uuid] = _missing(entry, silent) if gpu is None else _back(gpu, entry)
        if gpu is not None and results[entry.uuid]["did"] in {"restored", "kept"}:
            # Those that are back already, too: a call of ours that hung may still be on its way to the GPU.
            wanted[gpu.index] = entry
    for index, reads in nvml.set_limits({index: entry.found_mw for index, entry in wanted.items()}, by_s).items():
        answer = results[wanted[index].uuid]
        if isinstance(reads, NvmlError) and (answer["did"] == "restored" or reads.hangs):
            answer |= {"did": "failed", "because": str(reads), "watts_after": answer["watts_before"]}
    return results


def _back(gpu: Gpu, entry: KeptLimit) -> Answer:
    now_mw = gpu.limit_mw
    if entry.is_found(now_mw):
        return _result(gpu, "kept", now_mw, now_mw, "is back already")
    if not entry.is_ours(now_mw):
        because = (
            f"another program has set {_watts(now_mw):g} W since ({_watts(entry.found_mw):g} W was found): left alone"
        )
        return _result(gpu, "left_alone", now_mw, now_mw, because)
    return _result(gpu, "restored", now_mw, entry.found_mw)


def _missing(entry: KeptLimit, silent: NvmlError | None) -> Answer:
    known = {"index": entry.index, "uuid": entry.uuid, "name": entry.name}
    if silent is not None:  # it may be the one that does not answer
        return {**known, "did": "failed", "because": str(silent)}
    because = f"the GPU is gone; {_watts(entry.found_mw):g} W was found; a reset clears the lowered limit"
    return {**known, "did": "gone", "because": because}


def do_hold(folder: GpuFolder, _word: GpuRequest) -> Answer:
    """Let the cap stay for another lease; no effect without a cap."""
    kept = folder.read()
    if kept is not None:
        folder.hold()
    return {"ok": True, "capped": 0 if kept is None else len(kept.gpus)}


WORDS: Final[Mapping[str, Callable[[GpuFolder, GpuRequest], Answer]]] = {
    "list": do_list,
    "health": do_health,
    "cap": do_cap,
    "restore": do_restore,
    "hold": do_hold,
}


def _result(gpu: Gpu, did: str, before_mw: int, after_mw: int, because: str = "") -> Answer:
    watts = {"watts_before": _watts(before_mw), "watts_after": _watts(after_mw)}
    return {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "did": did, **watts, "because": because}


def _answer(results: Mapping[Any, Answer]) -> Answer:
    """Put the answer together. The sums are the limits of the GPUs whose limits are known."""
    gpus = sorted(results.values(), key=lambda gpu: int(gpu["index"]))
    sums = {key: sum(gpu.get(key, 0.0) for gpu in gpus) for key in ("watts_before", "watts_after")}
    return {"ok": True, **sums, "gpus": gpus}


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


# --- Understanding ---------------------------------------------------------------------------------------------------


def checked(fields: Mapping[str, object]) -> GpuRequest:
    """Return the word of a request, if it is valid. Raises RefusedError."""
    word = fields.get("word")
    if not isinstance(word, str) or word not in WORDS:
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    expected = {"word", "share"} if word == "cap" else {"word"}
    if set(fields) != expected:
        msg = f"{word} takes {' and '.join(sorted(expected - {'word'})) or 'no other key'}"
        raise RefusedError(msg)
    share = _share(fields["share"]) if word == "cap" else 1.0
    return GpuRequest(word=word, share=share, within_s=HEALTH_S if word == "health" else WITHIN_S)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 < value <= 1):
        msg = "share must be a number above 0, at most 1, such as 0.6"
        raise RefusedError(msg)
    return float(value)


def carry_out(folder: GpuFolder, word: GpuRequest) -> Answer:
    """Do what is asked, and answer whatever happens."""
    try:
        if word.word != "health":  # which neither reads the folder nor makes a change
            refuse_under_test(folder.path, FOLDER, "change the GPUs")
        answer = WORDS[word.word](folder, word)
    except (NvmlError, KeptError, RefusedError) as error:
        answer = {"ok": False, "error": str(error)}
    return {"schema_version": 1, "word": word.word, **answer}


def _carry_out_and_log(folder: GpuFolder, fields: Mapping[str, object]) -> Answer:
    answer = carry_out(folder, checked(fields))
    _log(answer)
    return answer


# --- The ways in ----------------------------------------------------------------------------------------------------


def watch(folder: GpuFolder, lease_s: float) -> int:
    """Wait until no GPU is capped (0), or until the limits are due: then put them back, once, and end.

    systemd starts it again for as long as the file is there (powerguard-gpu-watch.path), so each attempt is a process
    of its own, and one that hangs in the driver is no worse than that.
    """
    kept = wait_until_due(folder.read, lambda kept: 0.0 if kept is None else kept.due_s(folder.held_s(), lease_s))
    if kept is None:
        return 0
    if not kept.ordered_s:
        log_line(4, f"the daemon has not renewed the cap for {lease_s:g} s: restoring the limits")
    answer = carry_out(folder, GpuRequest(word="restore", within_s=UNASKED_S, unasked=True))
    _log(answer)
    return 0 if answer["ok"] else 1


def _log(answer: Answer) -> None:
    """Log what was changed and what went wrong (severity as in syslog(3))."""
    gpus = answer.get("gpus", [])
    for gpu in gpus:
        if gpu.get("did") in {"failed", "gone", "left_alone"}:
            log_line(4, f"{answer['word']}: GPU {gpu['index']}: {gpu['did']}: {gpu['because']}")
    changed = [gpu for gpu in gpus if gpu.get("did") in {"capped", "restored"}]
    for gpu in changed:
        log_line(5, f"GPU {gpu['index']} {gpu['uuid']}: {gpu['watts_before']:g} W -> {gpu['watts_after']:g} W")
    if not answer["ok"]:
        log_line(3, f"{answer['word'] or 'refused'}: {answer['error']}")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one word of the command line and return the exit status: 0 done, 1 not done, 64 usage."""
    parser = argparse.ArgumentParser(prog="powerguard-gpu", description="GPU power limits, as root.")
    parser.add_argument("word", choices=[*WORDS, "serve", "watch"])
    parser.add_argument("share", nargs="?", type=float, help="for cap: share of the limit found, such as 0.6")
    parser.add_argument("--folder", default=FOLDER, type=Path, help=f"folder for the limits found ({FOLDER})")
    parser.add_argument(
        "--lease-s", default=LEASE_S, type=seconds, help="for watch: how long a cap lasts without renewal"
    )
    parser.add_argument("--within-s", type=seconds, help=f"how long NVML may take ({WITHIN_S:g}; health {HEALTH_S:g})")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    folder = GpuFolder(args.folder)
    if args.word == "serve":
        return serve(lambda fields: _carry_out_and_log(folder, fields), awaited=("cap",))
    if args.word == "watch":
        return watch(folder, args.lease_s)
    fields: dict[str, object] = {"word": args.word} if args.share is None else {"word": args.word, "share": args.share}
    return by_hand("powerguard-gpu", lambda: carry_out(folder, _within(checked(fields), args.within_s)))


def _within(word: GpuRequest, within_s: float | None) -> GpuRequest:
    return word if within_s is None else replace(word, within_s=min(max(within_s, 1.0), 600.0))


def main() -> NoReturn:
    """Run, and end at once: a thread that hangs in the driver must not keep this process, nor its answer."""
    status = run()
    # Not sys.exit: the end of Python runs the library's own, which waits for the driver.
    os._exit(status)


if __name__ == "__main__":
    main()
