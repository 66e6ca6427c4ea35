"""The effector `signals`: has the processes of a trainer stopped, ended or continued, and signals units to save.

The daemon has no right to signal other users' processes. It sends one word to the root helper powerguard-signal, which
has no other function (docs/guides/gpu-and-signals.md). Its use:

    SignalHelper(socket).ask({"word": "list"})                     one word and its answer; raises EffectorError
    SignalHelper(socket).checkpoint("train.service", "USR1")       USR1, USR2 or TERM to a unit that root has listed

`SignalEffector` carries out StopTrainer, TerminateTrainer and ContinueTrainer; `hold` renews what is stopped.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from powerguard.core.model.actions import Action, ContinueTrainer, Detail, StopTrainer, TerminateTrainer
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.findings import Finding, watch
from powerguard.effectors.options import SIGNAL_SOCKET, SignalsOptions
from powerguard.effectors.root_client import RootHelper, objects_in

log = structlog.get_logger()

LIMIT_S: Final = 4.75
"""Timeout for one request. The helper itself answers within 4 s. Less than an order has (escalation.LIMIT_S): at that,
only "timed out" would be reported, and not which helper hangs."""

TRAINER_SOCKETS: Final = "/run/powerguard-trainers"
CheckpointSignal = Literal["USR1", "USR2", "TERM"]


class SignalHelper:
    """powerguard-signal, as the daemon reaches it."""

    def __init__(self, socket: str = SIGNAL_SOCKET, *, limit_s: float = LIMIT_S) -> None:
        """limit_s: for one word; a caller that cancels earlier is free to."""
        self._helper = _helper(socket)
        self._limit_s = limit_s

    async def ask(self, word: dict[str, object]) -> dict[str, Any]:
        """Send one word and return the answer. Raises EffectorError, also if the helper refuses."""
        return await self._helper.ask(word, limit_s=self._limit_s)

    async def checkpoint(self, unit: str, signal: CheckpointSignal) -> dict[str, Any]:
        """Have a unit sent the signal by which it makes a checkpoint. Raises EffectorError.

        Only units and signals that root has listed in /etc/powerguard/signals are sent any. The answer names the
        processes that have a handler and got it (`processes`, of `pid`, `name` and `did`), and how many (`signalled`).
        """
        return await self.ask({"word": "checkpoint", "unit": unit, "signal": signal})


def _helper(socket: str) -> RootHelper:
    return RootHelper(name="powerguard-signal", socket=socket, real=SIGNAL_SOCKET)


class SignalEffector:
    """Carries out StopTrainer, TerminateTrainer and ContinueTrainer. Twice is as good as once."""

    def __init__(
        self,
        options: SignalsOptions,
        *,
        sockets: Mapping[str, str | None],
        folder: str = TRAINER_SOCKETS,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Set up, without touching anything.

        sockets: path of the unix socket of each trainer of the settings, by its name; None where it has none. Others
        were found by their sockets in `folder`, which are called as they are. limit_s: for one word.
        """
        self._options = options
        self._helper = _helper(options.socket)
        self._sockets = dict(sockets)
        self._folder = folder
        self._limit_s = limit_s

    async def carry_out(self, action: Action) -> Detail:
        """Stop, end or continue. Raises EffectorError.

        Detail: `processes` (how many it reached), `scope` (whose they are: a unit, or the listener's own tree),
        `pending` (how many did not follow yet).
        """
        match action:
            case StopTrainer(trainer=name):
                word = {"word": "stop", "socket": self._socket_of(name)}
            case TerminateTrainer(trainer=name):
                word = {"word": "terminate", "socket": self._socket_of(name)}
            case ContinueTrainer(trainer=name):
                if self._options.kind == "none" and not self._helper.is_there():
                    return (("processes", 0),)  # the helper is not installed, so no process was stopped
                word = {"word": "continue", "socket": self._name_of(name)}
            case _:
                msg = f"signals: cannot carry out {type(action).__name__}: only stop, terminate and continue"
                raise EffectorError(msg)
        return _detail(await self._helper.ask(dict(word), limit_s=self._limit_s))

    def _socket_of(self, name: str) -> str:
        """Name of a trainer's socket, if it may be signalled at all. Raises EffectorError."""
        if self._options.kind == "none":
            msg = (
                "signals.kind is none: processes are left alone (set signals.kind: helper, see "
                "docs/guides/gpu-and-signals.md)"
            )
            raise EffectorError(msg)
        path = self._sockets.get(name, f"{self._folder}/{name}.sock")
        if path is None or str(Path(path).parent) != self._folder:
            msg = f"{name}: has no socket in {self._folder}, so its process cannot be identified"
            raise EffectorError(msg)
        return Path(path).name

    def _name_of(self, name: str) -> str:
        return Path(self._sockets.get(name) or f"{name}.sock").name

    async def hold(self, wanted: Callable[[], bool], rest: Callable[[float], Any]) -> None:
        """Renew the lease of the stopped trainers at the helper, for as long as they are; never returns.

        wanted: what the core remembers. A daemon that is gone, or has forgotten, is silent, and they continue.
        """

        def failed(because: str) -> None:
            log.warning("signal_hold_failed", because=because, continued_after_s=180)

        await self._helper.hold(wanted, rest, failed, limit_s=self._limit_s)


def _detail(answer: dict[str, Any]) -> Detail:
    """The details of an answer, for the journal and for messages."""
    processes = objects_in(answer, "processes")
    # Of many only the first are named.
    counts = [count for key in ("stopped", "terminated", "continued") if isinstance(count := answer.get(key), int)]
    return (
        ("processes", max(len(processes), *counts, 0)),
        ("pending", sum(each.get("did") == "pending" for each in processes)),
        ("scope", str(answer.get("scope", ""))[:200]),
        ("because", str(answer.get("because", ""))[:500]),
    )


# --- For doctor: can a trainer that ignores a pause be stopped, and would it continue? --------------------------------

WATCH: Final = "powerguard-signal-watch.path"
_GUIDE: Final = "docs/guides/gpu-and-signals.md"


async def findings(
    options: SignalsOptions, *, pausing: Collection[str] = (), spawn: Spawn = run_child, limit_s: float = LIMIT_S
) -> list[Finding]:
    """Return the findings. Takes some seconds at most.

    pausing: names of the sockets of the settings' trainers that are to pause or to exit; only they are ever signalled.
    limit_s: for the helper's answer.
    """
    if options.kind == "none":
        text = f"off: a trainer that does not pause is not stopped (set signals.kind: helper to change that; {_GUIDE})"
        return [Finding("signals", "PASS", text)]
    try:
        answer = await SignalHelper(options.socket, limit_s=limit_s).ask({"word": "list"})
    except EffectorError as error:
        if "only powerguard and root may" in str(error):
            return [Finding("signals", "WARN", f"{error}: not checked", "run doctor as root or as powerguard")]
        return [Finding("signals", "FAIL", str(error), f"{_GUIDE}, or signals.kind: none")]
    trainers = {str(each.get("socket")): each for each in objects_in(answer, "trainers")}
    left_out = answer.get("left_out")
    absent = f"not listed ({left_out} sockets are left out: remove old ones)" if left_out else "no such socket now"
    wrong = [
        f"{name}: {trainers[name].get('because') if name in trainers else absent}"
        for name in sorted({*pausing, *trainers})
        if trainers.get(name, {}).get("reachable") is not True
    ]
    able = [each for each in trainers.values() if each.get("reachable") is True]
    found = []
    if able:
        listing = ", ".join(
            f"{each.get('socket')}: {each.get('processes')} in {each.get('scope')}" for each in able[:8]
        )
        found.append(Finding("signals", "PASS", f"could be stopped: {listing}"))
    elif not wrong:
        found.append(Finding("signals", "PASS", "the helper answers; no trainer listens now"))
    if wrong:
        found.append(Finding("signals", "WARN", f"cannot be signalled: {'; '.join(wrong[:8])}", _GUIDE))
    stopped = objects_in(answer, "stopped")
    if stopped:
        names = ", ".join(str(each.get("socket")) for each in stopped[:8])
        text = f"stopped now: {names}, by an outage or because SIGCONT fails"
        found.append(
            Finding(
                "signals.stopped", "WARN", text, "`powerguard status`; by hand, as root: powerguard-signal continue"
            )
        )
    well = "stopped trainers continue even if the daemon does not continue them"
    return [*found, await watch(spawn, "signals.watch", WATCH, well=well, ill="training would stand")]
