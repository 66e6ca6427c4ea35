"""A small file that is put in place as a whole and durably. Standard library only."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o640) -> None:
    """Replace the file: a kill or a power cut at any instant leaves the old one or the new one.

    mode: of the new one, less the umask. Blocks for as long as the disk does: not for an event loop's thread.
    Raises OSError, and then the old one remains.
    """
    fresh = path.with_name(f".{path.name}.new")  # hidden: "bmc.new" may be another secret
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW  # not through a link of another user
    try:
        descriptor = os.open(fresh, flags, mode)
    except PermissionError:
        fresh.unlink()  # of another user's command that was killed; the folder is ours
        descriptor = os.open(fresh, flags, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # The name is on disk only once its folder is.
    finally:
        os.close(folder)
