"""powerguard-signal: the root helper that stops, continues or ends training that still draws power.

systemd starts one process for each connection to powerguard-signal.socket, which only user powerguard can open. It
reads one JSON line, answers with one, and ends. The words are a closed list:

    {"word": "list"}                              what could be signalled, and what is stopped; no change
    {"word": "stop", "socket": "llm.sock"}        SIGSTOP to the job that listens on this socket
    {"word": "terminate", "socket": "llm.sock"}   SIGTERM, and SIGCONT, without which it would never be delivered
    {"word": "continue", "socket": "llm.sock"}    SIGCONT to what it has stopped; without a socket: to all of it
    {"word": "hold"}                              the daemon is there and wants stopped jobs to stay so
    {"word": "checkpoint", "unit": "train.service", "signal": "USR1"}    only what /etc/powerguard/signals lists

No caller can name a process: a job is found by the name of its socket in /run/powerguard-trainers, and the kernel
reports its process. Root's processes are never stopped or ended. People call it as root: `powerguard-signal list`,
`powerguard-signal continue`. Only the standard library is imported.

Which units may be sent which signal for a checkpoint: root's file, one `UNIT SIGNAL` a line.

What powerguard-signal has stopped: one small file, written before the first process is signalled.

It lies in /run and names the boot, for no process outlives one. Each entry holds the processes of a job, with their
start times, so that no other process is ever taken for one of them.
"""

import argparse
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from powerguard.clock import boottime_s
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
from powerguard.effectors.signals.processes import (
    SOCKET_NAME,
    STOPPED,
    Job,
    NotFoundError,
    Process,
    catches,
    everybody,
    job_of,
    listener,
    look,
    send,
    topmost,
    unit_processes,
)

ALLOWED: Final = "/etc/powerguard/signals"
SIGNALS: Final = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2, "TERM": signal.SIGTERM}
UNIT: Final = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.(?:service|scope)")

_MOST_BYTES: Final = 65536


def allowed(path: Path, owner: int) -> frozenset[tuple[str, str]]:
    """Read which units may be sent which signal. Raises RefusedError for a file that others can change.

    owner: another permitted owner, in a test.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            for what, found in ((path, os.fstat(descriptor)), (path.parent, path.parent.stat())):
                if found.st_uid not in (0, owner) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    msg = f"{what}: other users than root can change it, so it is not trusted (chown root, chmod go-w)"
                    raise RefusedError(msg)
            text = os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror or error} (it must be a regular file)"
        raise RefusedError(msg) from None
    pairs: set[tuple[str, str]] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not UNIT.fullmatch(words[0]) or words[1].removeprefix("SIG") not in SIGNALS:
            msg = f"{path}:{number}: expected UNIT and one of {', '.join(SIGNALS)}, such as: train.service USR1"
            raise RefusedError(msg)
        pairs.add((words[0], words[1].removeprefix("SIG")))
    return frozenset(pairs)


LEASE_S: Final = 180.0
"""A stop holds this long after the daemon last said so: longer than its restart (20 s to stop, 60 s to start)."""

STOPPED_FILE: Final = "stopped.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """One job that was stopped at at_s. processes: (pid, ticks since boot at which it was started)."""

    socket: str
    uid: int
    at_s: float
    processes: tuple[tuple[int, int], ...]


class SignalFolder(BootFolder):
    """The helper's own folder: /run/powerguard-signal, or a test's."""

    def __init__(self, path: Path) -> None:
        by_hand = "let stopped processes go on by hand (kill -CONT)"
        super().__init__(path, helper="powerguard-signal", file=STOPPED_FILE, by_hand=by_hand)

    def read(self) -> tuple[Stopped, ...]:
        """The stopped processes on file. Raises KeptError."""
        content = self.load()
        if content is None:
            return ()
        try:
            return tuple(
                Stopped(
                    socket=str(each["socket"]),
                    uid=int(each["uid"]),
                    at_s=past_s(each["at_s"]),
                    processes=tuple((int(pid), int(started)) for pid, started in each["processes"]),
                )
                for each in content["stopped"]
            )
        except (ValueError, KeyError, TypeError):
            raise self.nonsense() from None

    def write(self, entries: tuple[Stopped, ...]) -> None:
        """Keep these; the file is gone where there are none."""
        if entries:
            self.keep({"stopped": [asdict(each) for each in entries]})
        else:
            self.forget()


FOLDER: Final = "/run/powerguard-signal"
SOCKETS: Final = "/run/powerguard-trainers"
WITHIN_S: Final = 3.0
"""Timeout for an answer."""

_ROUNDS: Final = 5
"""Number of further scans: a process that is not stopped yet may start others."""

_SETTLE_S: Final = 1.0
_MOST_LISTED: Final = 64
"""Most entries of each kind in an answer, which is one line of at most 64 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where things lie: this machine's own, or a test's. owner: whose the list of allowed signals must be."""

    folder: SignalFolder
    sockets: Path = Path(SOCKETS)
    allowed: Path = Path(ALLOWED)
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest:
    """One request. socket: of a trainer; "" for all (continue). unit, signal: for checkpoint only."""

    word: str
    socket: str = ""
    unit: str = ""
    signal: str = ""


# --- Stopping and going on ------------------------------------------------------------------------------------------


def do_stop(places: Places, word: SignalRequest) -> Answer:
    """Stop a job. What is stopped is in the file before the first of its processes is signalled."""
    by_s = boottime_s() + WITHIN_S
    with places.folder.locked(by_s):
        kept = places.folder.read()
        job = _job(places, word.socket, kept)
        known, others = _parted(kept, word.socket, job.listener.uid)
        places.folder.hold()
        sent: set[tuple[int, int]] = set()
        refused: list[Process] = []
        for turn in range(_ROUNDS + 1):
            # A stopped one was stopped by this helper (it is in the file) or by another program. A debugger's (t)
            # continues later.
            fresh = [each for each in job.processes if each.key not in sent and each.state != "T"]
            if not fresh or turn == _ROUNDS or (turn and boottime_s() > by_s):
                break
            sent |= {each.key for each in fresh}
            keys = dict.fromkeys((*known.processes, *(each.key for each in fresh)))
            known = replace(known, processes=tuple(keys))
            places.folder.write((*others, known))
            refused += _signal(fresh, signal.SIGSTOP)[1]
            job = _again(job)
        results = _settled(known, lambda process: process.state in STOPPED)
        results += [(process, "pending") for process in fresh]  # it starts others faster than we stop them
        answer = _answer(word, job, results, "stopped") | _not_permitted(refused)
        if not known.processes and not any(each.state in STOPPED for each in job.processes):
            answer |= {"ok": False, "error": f"{word.socket}: no process was left to stop"}
        return answer


def do_terminate(places: Places, word: SignalRequest) -> Answer:
    """End a job, as systemd would: SIGTERM, then SIGCONT, without which a stopped process never gets it."""
    by_s = boottime_s() + WITHIN_S
    with places.folder.locked(by_s):
        kept = places.folder.read()
        job = _job(places, word.socket, kept)
        ended, refused = _signal(job.processes, signal.SIGTERM)
        _signal(ended, signal.SIGCONT)
        _let_go(places, kept, word.socket)
        answer = _answer(word, job, [(process, "terminated") for process in ended], "terminated")
        if not ended:
            answer |= {"ok": False, "error": f"{word.socket}: no process was left to end"}
        return answer | _not_permitted(refused)


def do_continue(places: Places, word: SignalRequest) -> Answer:
    """Continue the stopped processes, and forget them. No effect without a file."""
    with places.folder.locked(boottime_s() + WITHIN_S):
        results, refused = _let_go(places, places.folder.read(), word.socket)
    answer: Answer = {"ok": True, "socket": word.socket, **_counted(results, "continued")}
    standing = [process.pid for process, did in results if did == "pending"]
    if standing:
        # SIGCONT is never lost: one that is still stopped was stopped again, or is held by a debugger.
        named = ", ".join(map(str, standing[:_MOST_LISTED]))
        answer["because"] = f"still stopped, by another program: {named}"
    return answer | _not_permitted(refused)


def _let_go(places: Places, kept: tuple[Stopped, ...], name: str) -> tuple[list[tuple[Process, str]], list[Process]]:
    """Send SIGCONT to what is kept under this name, or to all of it. Twice is as good as once.

    Returns the result for each, and the users for whom it was not permitted: those stay in the file.
    """
    going = [entry for entry in kept if name in ("", entry.socket)]
    refused = [each for entry in going for each in _signal(_processes(entry), signal.SIGCONT)[1]]
    keys = {process.key for process in refused}
    results = [
        (process, "failed" if process.key in keys else "continued" if did == "stopped" else did)
        for entry in going
        for process, did in _settled(entry, lambda process: process.key in keys or process.state not in STOPPED)
    ]
    if going:
        left = (replace(entry, processes=tuple(key for key in entry.processes if key in keys)) for entry in going)
        others = (entry for entry in kept if entry not in going)
        try:
            places.folder.write((*others, *(entry for entry in left if entry.processes)))
        except KeptError as error:  # they continue anyway, and the watch will send SIGCONT once more
            log_line(4, str(error))
    return results, refused


def _signal(processes: Sequence[Process], word: signal.Signals) -> tuple[list[Process], list[Process]]:
    """Send a signal to each. Returns those that got it, and the users that may not be signalled."""
    reached, refused = [], []
    for process in processes:
        try:
            if send(process, word):
                reached.append(process)
        except PermissionError:
            refused.append(process)
    return reached, refused


def _not_permitted(refused: Sequence[Process]) -> Answer:
    if not refused:
        return {}
    names = ", ".join(f"{_printable(process.name)} ({process.pid})" for process in refused[:8])
    text = f"not permitted for {names}: powerguard-signal lacks CAP_KILL, or a security module forbids it (dmesg)"
    return {"ok": False, "error": text}


def _parted(kept: tuple[Stopped, ...], name: str, uid: int) -> tuple[Stopped, tuple[Stopped, ...]]:
    """Split the kept processes: the living ones of this user under this name, and all others.

    The same name may be another user's by now: processes that were stopped before stay in the file.
    """
    own = [entry for entry in kept if (entry.socket, entry.uid) == (name, uid)]
    alive = tuple(process.key for entry in own for process in _processes(entry))
    known = Stopped(socket=name, uid=uid, at_s=boottime_s(), processes=alive)
    return known, tuple(entry for entry in kept if entry not in own)


def _job(places: Places, name: str, kept: tuple[Stopped, ...]) -> Job:
    """Find the job by its socket. A stopped job no longer accepts connections: then use the file."""
    try:
        return job_of(listener(places.sockets, name), everybody())
    except NotFoundError as error:
        for entry in kept:
            standing = _processes(entry) if entry.socket == name else []
            if standing:
                return Job(listener=standing[0], scope="what was stopped", processes=tuple(standing))
        raise RefusedError(str(error)) from None


def _again(job: Job) -> Job:
    process = look(job.listener.pid)
    return job if process is None or process.key != job.listener.key else job_of(process, everybody())


def _processes(entry: Stopped) -> list[Process]:
    found = (look(pid) for pid, _ in entry.processes)
    return [each for each in found if each is not None and each.key in entry.processes and each.uid == entry.uid]


def _settled(entry: Stopped, fits: Callable[[Process], bool]) -> list[tuple[Process, str]]:
    """Wait a moment until all that live fit. One in the middle of a system call stops, or wakes, when that ends."""
    by_s = boottime_s() + _SETTLE_S
    while True:
        found = _processes(entry)
        if all(fits(process) for process in found) or boottime_s() >= by_s:
            return [(process, "stopped" if fits(process) else "pending") for process in found]
        time.sleep(0.01)


def _answer(word: SignalRequest, job: Job, results: Sequence[tuple[Process, str]], did: str) -> Answer:
    return {
        "ok": True,
        "socket": word.socket,
        "uid": job.listener.uid,
        "listener": job.listener.pid,
        "scope": job.scope,
        **_counted(results, did),
    }


def _counted(results: Sequence[tuple[Process, str]], did: str) -> Answer:
    """The number of processes, and the first of them by name; failures come first."""
    ordered = sorted(results, key=lambda each: each[1] == did)
    return {
        did: sum(one == did for _, one in results),
        "processes": [_result(*each) for each in ordered[:_MOST_LISTED]],
    }


def _result(process: Process, did: str) -> Answer:
    return {"pid": process.pid, "name": _printable(process.name), "did": did}


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# --- The other words ------------------------------------------------------------------------------------------------


def do_list(places: Places, word: SignalRequest) -> Answer:
    """List what could be signalled, and what is stopped; make no change."""
    del word
    try:
        names = sorted(name for name in os.listdir(places.sockets) if SOCKET_NAME.fullmatch(name))  # noqa: PTH208
    except OSError as error:
        return {"ok": False, "error": f"{places.sockets}: {error.strerror or error}"}
    kept = places.folder.read()
    by_s, among = boottime_s() + WITHIN_S, everybody()
    looked = [_listed(places, name, among) for name in names if boottime_s() < by_s]
    # A user who creates many sockets there must not hide those with a listener.
    trainers = sorted(looked, key=lambda each: (not each["reachable"], each["socket"]))[:_MOST_LISTED]
    stopped = [
        {
            "socket": entry.socket,
            "uid": entry.uid,
            "since_s": round(boottime_s() - entry.at_s, 1),
            "processes": len(_processes(entry)),
        }
        for entry in kept[:_MOST_LISTED]
    ]
    left_out = len(names) - len(trainers)
    answer = {"ok": True, "trainers": trainers, "left_out": left_out, "stopped": stopped}
    try:
        units = sorted(allowed(places.allowed, places.owner))[:_MOST_LISTED]
    except RefusedError as error:
        return {**answer, "units": [], "units_because": str(error)}
    return {**answer, "units": [{"unit": unit, "signal": name} for unit, name in units], "units_because": ""}


def _listed(places: Places, name: str, among: Mapping[int, Process]) -> Answer:
    try:
        job = job_of(listener(places.sockets, name), among)
    except NotFoundError as error:
        return {"socket": name, "reachable": False, "because": str(error)}
    process = job.listener
    return {
        "socket": name,
        "reachable": True,
        "uid": process.uid,
        "listener": process.pid,
        "name": _printable(process.name),
        "scope": job.scope,
        "processes": len(job.processes),
        "because": "",
    }


def do_hold(places: Places, word: SignalRequest) -> Answer:
    """Let what is stopped stay so for another lease; else no effect."""
    del word
    kept = places.folder.read()
    if kept:
        places.folder.hold()
    return {"ok": True, "stopped": len(kept)}


def do_checkpoint(places: Places, word: SignalRequest) -> Answer:
    """Ask a unit for a checkpoint by a signal that root has allowed for it: its topmost processes that have a handler.

    Without a handler the signal would end a process: a shell around a trainer, a program that only helps it.
    """
    if (word.unit, word.signal) not in allowed(places.allowed, places.owner):
        msg = f"{word.unit} {word.signal}: is not in {places.allowed} (one `UNIT SIGNAL` a line, root's to write)"
        raise RefusedError(msg)
    number = SIGNALS[word.signal]
    present = unit_processes(word.unit)
    if not present:
        msg = f"{word.unit}: has no process under the system's own manager (systemctl status {word.unit})"
        raise RefusedError(msg)
    signalled = [each for each in topmost(present, lambda each: catches(each.pid, number)) if send(each, number)]
    if not signalled:
        msg = f"{word.unit}: none of its processes handles SIG{word.signal}, which would only end them"
        raise RefusedError(msg)
    processes = [_result(process, "signalled") for process in signalled]
    return {"ok": True, "unit": word.unit, "signal": word.signal, "signalled": len(signalled), "processes": processes}


WORDS: Final[Mapping[str, Callable[[Places, SignalRequest], Answer]]] = {
    "list": do_list,
    "stop": do_stop,
    "terminate": do_terminate,
    "continue": do_continue,
    "hold": do_hold,
    "checkpoint": do_checkpoint,
}
_TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "stop": ("socket",),
    "terminate": ("socket",),
    "continue": ("socket",),
    "checkpoint": ("unit", "signal"),
}


# --- Understanding ---------------------------------------------------------------------------------------------------


def checked(fields: Mapping[str, object]) -> SignalRequest:
    """Return the word of a request, if it is valid. Raises RefusedError."""
    name = fields.get("word")
    if not isinstance(name, str) or name not in WORDS:
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    takes = _TAKES.get(name, ())
    needed = set() if name == "continue" else set(takes)
    given = set(fields) - {"word"}
    if not needed <= given <= set(takes) or not all(isinstance(fields[key], str) for key in given):
        msg = f"{name} takes {' and '.join(takes) or 'no other key'}, as text"
        raise RefusedError(msg)
    word = SignalRequest(**{"word": name, **{key: str(fields[key]) for key in given}})
    if "socket" in given and not SOCKET_NAME.fullmatch(word.socket):
        msg = f"{word.socket[:80]!r} is not the name of a socket in {SOCKETS} (example: llm.sock)"
        raise RefusedError(msg)
    if name == "checkpoint" and (not UNIT.fullmatch(word.unit) or word.signal not in SIGNALS):
        msg = f"checkpoint takes a unit (such as train.service) and one of {', '.join(SIGNALS)}"
        raise RefusedError(msg)
    return word


def carry_out(places: Places, word: SignalRequest) -> Answer:
    """Do what is asked, and answer whatever happens."""
    try:
        refuse_under_test(places.folder.path, FOLDER, "signal processes")
        answer = WORDS[word.word](places, word)
    except (KeptError, RefusedError) as error:
        answer = {"ok": False, "error": str(error)}
    except OSError as error:
        # The kernel refuses (a sandbox, a security module): what was begun is in the file, and is continued from there.
        answer = {"ok": False, "error": f"not permitted, or failed: {error.strerror or error}"}
    _log(word, answer)
    return {"schema_version": 1, "word": word.word, **answer}


def _log(word: SignalRequest, answer: Answer) -> None:
    """Log which processes a word has reached and what went wrong."""
    target = word.socket or word.unit
    for process in answer.get("processes", []):
        log_line(5, f"{target or 'all'}: {process['name']} ({process['pid']}): {process['did']}")
    if not answer["ok"]:
        log_line(3, f"{word.word}: {answer['error']}")


# --- The ways in ----------------------------------------------------------------------------------------------------


def watch(places: Places, lease_s: float) -> int:
    """Wait until no job is stopped (0), or until the daemon has been silent for too long: then continue all.

    systemd starts it again for as long as the file is there (powerguard-signal-watch.path).
    """
    folder = places.folder
    held = wait_until_due(folder.read, lambda kept: max(folder.held_s(), *(each.at_s for each in kept)) + lease_s)
    if not held:
        return 0
    log_line(4, f"the daemon has not renewed the stop for {lease_s:g} s: continuing the stopped jobs")
    return 0 if carry_out(places, SignalRequest(word="continue"))["ok"] else 1


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one word of the command line and return the exit status: 0 done, 1 not done, 64 usage."""
    parser = argparse.ArgumentParser(prog="powerguard-signal", description="Signals to training jobs, as root.")
    parser.add_argument("word", choices=[*WORDS, "serve", "watch"])
    parser.add_argument("names", nargs="*", help="a socket's name, such as llm.sock; or a unit and a signal")
    parser.add_argument("--folder", default=FOLDER, type=Path, help=f"folder for the list of stopped jobs ({FOLDER})")
    parser.add_argument("--sockets", default=SOCKETS, type=Path, help=f"where trainers listen ({SOCKETS})")
    parser.add_argument("--allowed", default=ALLOWED, type=Path, help=f"units and signals for checkpoints ({ALLOWED})")
    parser.add_argument(
        "--lease-s", default=LEASE_S, type=seconds, help="for watch: how long a stop lasts without renewal"
    )
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    places = Places(folder=SignalFolder(args.folder), sockets=args.sockets, allowed=args.allowed, owner=os.geteuid())
    if args.word == "serve":
        return serve(lambda fields: carry_out(places, checked(fields)), awaited=("stop", "terminate"))
    if args.word == "watch":
        return watch(places, args.lease_s)
    # One name too many is a key too many, which `checked` refuses by saying what the word takes.
    takes = (*_TAKES.get(args.word, ()), "more", "and more")
    fields = {"word": args.word, **dict(zip(takes, args.names, strict=False))}
    return by_hand("powerguard-signal", lambda: carry_out(places, checked(fields)))


def main() -> None:
    """Run, and end with its status."""
    sys.exit(run())


if __name__ == "__main__":
    main()
