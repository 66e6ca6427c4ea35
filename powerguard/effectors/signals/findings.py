"""Checks of `powerguard doctor` on signals: can a trainer that ignores a pause be stopped, and would it continue?

It asks the root helper to list (a read), and systemd whether the watch is there.
"""

from collections.abc import Collection
from typing import Any, Final

from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.host.findings import Finding
from powerguard.effectors.options import SignalsOptions
from powerguard.effectors.signals.effector import LIMIT_S, SignalHelper

WATCH: Final = "powerguard-signal-watch.path"
LOOK_LIMIT_S: Final = 2.0
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
    trainers = {str(each.get("socket")): each for each in _objects(answer, "trainers")}
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
        told = ", ".join(f"{each.get('socket')}: {each.get('processes')} in {each.get('scope')}" for each in able[:8])
        found.append(Finding("signals", "PASS", f"could be stopped: {told}"))
    elif not wrong:
        found.append(Finding("signals", "PASS", "the helper answers; no trainer listens now"))
    if wrong:
        found.append(Finding("signals", "WARN", f"cannot be signalled: {'; '.join(wrong[:8])}", _GUIDE))
    stopped = _objects(answer, "stopped")
    if stopped:
        names = ", ".join(str(each.get("socket")) for each in stopped[:8])
        text = f"stopped now: {names}, by an outage or because SIGCONT fails"
        found.append(
            Finding(
                "signals.stopped", "WARN", text, "`powerguard status`; by hand, as root: powerguard-signal continue"
            )
        )
    return [*found, await _watch(spawn)]


async def _watch(spawn: Spawn) -> Finding:
    """Would they continue without the daemon?"""
    name = "signals.watch"
    asked = Finding(name, "WARN", f"cannot ask systemd about {WATCH}", "is this a systemd host?")
    try:
        ended = await spawn(["systemctl", "show", WATCH, "--property=LoadState,ActiveState"], limit_s=LOOK_LIMIT_S)
    except OSError:
        return asked
    told = dict(line.split("=", 1) for line in ended.stdout.decode("utf-8", "replace").splitlines() if "=" in line)
    if ended.timed_out or ended.returncode != 0 or "ActiveState" not in told:
        return asked
    if told["ActiveState"] == "active":
        return Finding(name, "PASS", "stopped trainers continue even if the daemon does not continue them")
    text = (
        f"{WATCH} is {told.get('LoadState')} and {told['ActiveState']}: without the daemon, training would stay stopped"
    )
    return Finding(name, "FAIL", text, f"systemctl enable --now {WATCH}")


def _objects(answer: dict[str, Any], key: str) -> list[dict[str, Any]]:
    told = answer.get(key)
    return [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
