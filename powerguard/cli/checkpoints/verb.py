"""`powerguard checkpoints`: list, verify, restore, export and prune those that there are, in every tier.

If no place is named, the settings and the trainers themselves say where checkpoints lie.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from powerguard.cli.render import Bar, Paint, amount, clean, duration, fold, say, table
from powerguard.cli.shared import EX_CONFIG, EX_USAGE, fail, whole
from powerguard.effectors.trainer.effector import sockets_in
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.effectors.trainer.peer import HttpAnswer, TrainerPeer
from powerguard.settings.load import SettingsError, load
from powerguard.trainer.store.manifest import StoreError, step_of
from powerguard.wire import STATUS_PATH, TrainerStatus

if TYPE_CHECKING:
    from powerguard.cli.checkpoints.found import Entry


def places_of(config: str) -> tuple[list[str], str]:
    """Return the folders that settings and trainers name, and else why there are none. Raises SettingsError."""
    settings = load(Path(config))
    trainers = [trainer for trainer in settings.trainers if isinstance(trainer, TrainerOptions)]
    if settings.trainer_sockets is not None:
        known = {trainer.socket_path for trainer in trainers}
        found, _ = sockets_in(Path(settings.trainer_sockets), uids=(), known=())
        trainers += [TrainerOptions(name=n, url=f"unix:{path}") for n, path in found.items() if path not in known]
    named = [trainer.checkpoint_dir for trainer in settings.trainers if trainer.checkpoint_dir is not None]
    places = [*settings.checkpoint_dirs, *named]
    places += asyncio.run(_reported_places(trainers))
    unique = list(dict.fromkeys(os.path.normpath(place) for place in places))
    return unique, "" if unique else "name a folder: neither settings (checkpoint_dirs) nor trainers name one"


async def _reported_places(trainers: Iterable[TrainerOptions]) -> list[str]:
    """Ask all trainers at once; one that does not answer in 3 s is skipped."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(trainer)) for trainer in trainers]
    return [place for task in tasks if (place := task.result())]


async def _ask(trainer: TrainerOptions) -> str:
    """Return the root that a trainer's last checkpoint lies in; "" if it does not report it."""
    peer = TrainerPeer(trainer, uids=None if trainer.uids is None else frozenset(trainer.uids))
    try:
        answer = await peer.call("GET", STATUS_PATH)
    finally:
        await peer.close()
    status = TrainerStatus.parse(answer.body) if isinstance(answer, HttpAnswer) and answer.status == 200 else None
    if not isinstance(status, TrainerStatus) or status.last_committed is None:
        return ""
    path = Path(status.last_committed.path)
    return str(path.parent if step_of(path.name) is not None else path) if path.is_absolute() else ""


_COLOURS: Final = {
    "complete": "",
    "verified": "green",
    "corrupt": "red",
    "unreadable": "red",
    "unfinished": "yellow",
    "not_sealed": "yellow",
    "set_aside": "yellow",
}
_PLACES: Final = "a folder, a checkpoint, or scheme://bucket/prefix/JOB (default: those of settings and trainers)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "List, verify, restore, export and prune native checkpoints and sealed folders of any framework, "
        "on local disks, a NAS and in object stores."
    )
    verbs = parser.add_subparsers(dest="checkpoints_verb", metavar="list|verify|restore|export|prune", required=True)
    listed = verbs.add_parser(
        "list",
        help="show step, age, size, tier and state",
        description="List them, the highest step first. Exit 0: listed; 1: none was found, a place cannot be read, "
        "or with --verify: one is not complete.",
    )
    listed.add_argument("place", metavar="PLACE", nargs="*", help=_PLACES)
    listed.add_argument("--verify", action="store_true", help="read every byte of each")
    checked = verbs.add_parser(
        "verify",
        help="read every byte, past the page cache",
        description="Read every byte of each checkpoint, past the page cache, and report what is missing, extra, "
        "changed or cut short. Exit 0: all are complete; 1: one is not, or none was found.",
    )
    checked.add_argument("place", metavar="PLACE", nargs="*", help=_PLACES)
    _add_restore(verbs.add_parser("restore", help="roll selected items or files back, into a new folder or in place"))
    export = verbs.add_parser(
        "export",
        help="write the weights of a model alone as a safetensors file",
        description="Write the weights of a model, out of a checkpoint of TorchState, as a new safetensors file. They "
        "are verified while they are read; optimizer and other state is left out. Exit 0: written; 1: not written.",
    )
    export.add_argument("place", metavar="CHECKPOINT", help="a checkpoint, or a folder of checkpoints (see --step)")
    export.add_argument("--to", metavar="FILE", required=True, help="the new file (example: model.safetensors)")
    export.add_argument(
        "--step", type=whole(example=1200), metavar="N", help="the checkpoint of this step (default: the newest)"
    )
    export.add_argument("--part", metavar="NAME", default="model", help="model.NAME of several, or ema (model)")
    prune = verbs.add_parser(
        "prune",
        help="remove old ones, never the last one that verifies",
        description="Remove all but the newest ones, after every byte of those has been read; also unfinished ones. "
        "Shows the list and asks first. Exit 0: removed, or none to remove; 1: refused, or you answered no.",
    )
    prune.add_argument("place", metavar="PLACE", nargs="+", help="a folder, or scheme://bucket/prefix/JOB")
    prune.add_argument(
        "--keep", type=whole(1, example=2), default=2, metavar="N", help="number of newest ones to keep (2)"
    )
    prune.add_argument("--set-aside", action="store_true", help="also remove those that were set aside")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    for name, each in verbs.choices.items():
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")
        if name == "export":
            continue  # it reads folders only
        group = each.add_argument_group("object stores")
        group.add_argument("--endpoint", metavar="URL", help="address of an S3 server other than Amazon's")
        group.add_argument("--region", metavar="NAME", help="region of the bucket")
        group.add_argument("--credentials-file", metavar="FILE", help="as ~/.aws/credentials")
        group.add_argument("--profile", metavar="NAME", help="section of that file")


def _add_restore(restore: argparse.ArgumentParser) -> None:
    restore.description = (
        "Restore items (of a native checkpoint) or files (of a sealed folder) from one checkpoint: --to a "
        "new folder, or (items) --into a job's root, without touching the rest. It is verified while it is read. "
        "--into can be undone. Exit 0: done; 1: not done, and unchanged."
    )
    restore.add_argument("place", metavar="CHECKPOINT", nargs="?", help="a checkpoint, or a place (see --step)")
    restore.add_argument(
        "--step", type=whole(example=1200), metavar="N", help="the checkpoint of this step (default: the newest)"
    )
    where = restore.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", metavar="DIR", help="a new folder")
    where.add_argument("--into", metavar="DIR", help="a job's root or its part of a store")
    where.add_argument("--undo", metavar="DIR", help="undo the last --into DIR")
    restore.add_argument(
        "--only", metavar="GLOB", action="append", default=[], help="names of items or files; may be repeated"
    )
    restore.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.checkpoints_verb == "restore":
        from powerguard.cli.checkpoints.restore import run as restore

        return restore(args)
    if args.checkpoints_verb == "prune":
        from powerguard.cli.checkpoints.prune import run as prune

        return prune(args)
    return _export(args) if args.checkpoints_verb == "export" else _list(args)


def _export(args: argparse.Namespace) -> int:
    from powerguard.trainer.weights import export, read_weights

    target = Path(args.to)
    try:
        weights = read_weights(args.place, step=args.step, part=args.part)
        size_bytes = export(weights, target)
    except StoreError as error:
        return fail(args, "checkpoints export", str(error), 1)
    except OSError as error:
        return fail(args, "checkpoints export", f"{error.filename or target}: {error.strerror}", 1)
    result = {
        "from": weights.path,
        "path": str(target.absolute()),
        "step": weights.step,
        "tensors": len(weights.tensors),
        "size_bytes": size_bytes,
        "left_out": list(weights.others),
    }
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "checkpoints_export", **result}, indent=2))
    else:
        left = f"; left out, because they are not tensors: {clean(', '.join(weights.others))}" if weights.others else ""
        what = f"{len(weights.tensors)} tensors of step {weights.step}, {amount(size_bytes)}"
        print(f"{clean(result['path'])}: {what}{left}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from powerguard.cli.checkpoints.found import PlaceError, access_of, entries_at, now_s, verified

    verb = f"checkpoints {args.checkpoints_verb}"
    reads = args.checkpoints_verb == "verify" or args.verify
    try:
        places, why = (args.place, "") if args.place else places_of(args.config)
    except SettingsError as error:
        code = EX_CONFIG if os.path.exists(args.config) else EX_USAGE  # noqa: PTH110 - False for one that cannot be looked for
        return fail(args, verb, f"name a folder, or correct the settings: {error.problems[0]}", code)
    if not places:
        return fail(args, verb, why, EX_USAGE)
    entries: list[Entry] = []
    trouble: list[tuple[str, str]] = []
    seen: set[str] = set()
    with Bar("", quiet=args.json) as bar:
        for place in places:
            try:
                found = entries_at(place, **access_of(args))
            except PlaceError as error:
                trouble.append((place, str(error)))
                continue
            if not found:
                trouble.append((place, f"{place}: no checkpoint there"))
            elif args.checkpoints_verb == "verify" and not _counted(found):
                trouble.append((place, f"{place}: no checkpoint there that training could resume from"))
            new = [entry for entry in found if entry.path not in seen]  # one place may lie in another
            seen |= {entry.path for entry in new}
            entries += [verified(entry, bar, **access_of(args)) if reads else entry for entry in new]
    if args.json:
        print(json.dumps(_object(places, entries, trouble, now_s()), indent=2))
    else:
        _print_entries(entries, now_s())
        for _, because in trouble:
            say(f"powerguard {verb}: {Paint(sys.stderr)('error', 'red')}: {clean(because)}")
    is_bad = any(each.state in ("corrupt", "unreadable") for each in entries)
    unsure = args.checkpoints_verb == "verify" and not all(each.state == "verified" for each in _counted(entries))
    return int(bool(trouble) or (reads and (is_bad or unsure)))


def _counted(entries: "list[Entry]") -> "list[Entry]":
    """Leave out checkpoints that cannot be resumed from: set aside, or never finished."""
    return [each for each in entries if each.state not in ("set_aside", "unfinished")]


def _object(places: list[str], entries: "list[Entry]", trouble: list[tuple[str, str]], now: float) -> dict[str, object]:
    return {
        "schema_version": 1,
        "object": "checkpoints",
        "places": places,
        "checkpoints": [entry.as_json(now) for entry in entries],
        "trouble": [{"place": place, "because": because} for place, because in trouble],
    }


def _print_entries(entries: "list[Entry]", now: float) -> None:
    if not entries:
        return
    paint = Paint()
    rows = [("step", "age", "size", "tier", "state", "path")]
    rows += [
        (
            "?" if each.step is None else str(each.step),
            "?" if each.created_s is None else duration(max(0.0, now - each.created_s)),
            amount(each.size_bytes),
            each.tier,
            each.state.replace("_", " "),
            clean(each.path),
        )
        for each in entries
    ]
    lines = table(rows, indent="")
    at = lines[0].index("state")
    width = max(len(row[4]) for row in rows)
    shown = [paint(lines[0], "dim")]
    for entry, line in zip(entries, lines[1:], strict=True):
        state = line[at : at + width]
        shown.append(f"{line[:at]}{paint(state, _COLOURS[entry.state])}{line[at + width :]}")
        if entry.because:
            shown.append(f"  {clean(entry.because)}")
    print("\n".join(fold(shown)))
