"""Where checkpoints may lie, when nobody says: what the settings and the trainers themselves tell."""

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from powerguard.effectors.trainer.options import MAX_SOCKET_PATH, TrainerOptions
from powerguard.effectors.trainer.peer import Answer, Peer
from powerguard.settings.load import SettingsError, load
from powerguard.trainer.manifest import step_of
from powerguard.wire import STATUS_PATH, TrainerStatus

_MOST = 64


def places_of(config: str) -> tuple[list[str], str]:
    """Return the folders that settings and trainers name, and else why there are none."""
    try:
        settings = load(Path(config))
    except SettingsError as error:
        return [], f"name a folder: {error.problems[0]}"
    trainers = [trainer for trainer in settings.trainers if isinstance(trainer, TrainerOptions)]
    if settings.trainer_sockets is not None:
        known = {trainer.socket_path for trainer in trainers}
        trainers += [found for found in _sockets(Path(settings.trainer_sockets)) if found.socket_path not in known]
    places = [trainer.checkpoint_dir for trainer in settings.trainers if trainer.checkpoint_dir is not None]
    places += asyncio.run(_told(trainers))
    unique = list(dict.fromkeys(os.path.normpath(place) for place in places))
    return unique, "" if unique else "name a folder: no trainer says where its checkpoints lie (checkpoint_dir)"


def _sockets(folder: Path) -> Iterator[TrainerOptions]:
    try:
        entries = sorted(os.scandir(folder), key=lambda each: each.name)[:_MOST]
    except OSError:
        return
    for entry in entries:
        try:
            is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
            if is_socket and entry.name.endswith(".sock") and len(os.fsencode(entry.path)) <= MAX_SOCKET_PATH:
                yield TrainerOptions(name=entry.name.removesuffix(".sock"), url=f"unix:{entry.path}")
        except (OSError, ValueError):
            continue


async def _told(trainers: Iterable[TrainerOptions]) -> list[str]:
    """Ask all trainers at once; whoever does not answer in 3 s tells nothing."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(trainer)) for trainer in trainers]
    return [place for task in tasks if (place := task.result())]


async def _ask(trainer: TrainerOptions) -> str:
    """Return the root that a trainer's last checkpoint lies in; "" where it does not tell."""
    peer = Peer(trainer, uids=None if trainer.uids is None else frozenset(trainer.uids))
    try:
        answer = await peer.call("GET", STATUS_PATH)
    finally:
        await peer.close()
    status = TrainerStatus.parse(answer.body) if isinstance(answer, Answer) and answer.status == 200 else None
    if not isinstance(status, TrainerStatus) or status.last_committed is None:
        return ""
    path = Path(status.last_committed.path)
    return str(path.parent if step_of(path.name) is not None else path) if path.is_absolute() else ""
