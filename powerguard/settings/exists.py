"""Does what the settings name exist: profiles, and files with secrets? For `config validate`.

The daemon starts without them: one UPS whose profile or secret is missing must not take the others from it.
"""

import difflib
import stat
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from powerguard.options import Secret
from powerguard.profiles.load import SITE_FOLDER, load_profiles
from powerguard.settings.explain import Mistake
from powerguard.settings.schema import Settings
from powerguard.sources.snmp_options import SnmpOptions
from powerguard.strictyaml import KeyPath


def missing(settings: Settings, site_folder: Path = SITE_FOLDER) -> tuple[list[Mistake], list[Mistake]]:
    """Return what the settings name and this host does not have, and what could not be found out."""
    mistakes, doubts = _profiles(settings, site_folder)
    files = [((*path, "file"), secret.file) for path, secret in secrets_in(settings) if secret.file is not None]
    for path, file in files:
        try:
            trouble = _trouble(Path(file))
        except PermissionError:
            doubts.append(Mistake(path, "not checked: permission denied (run this as root)"))
        else:
            mistakes += [Mistake(path, trouble)] if trouble else []
    return mistakes, doubts


def _profiles(settings: Settings, site_folder: Path) -> tuple[list[Mistake], list[Mistake]]:
    """Return the profiles that do not exist.

    A user who may not read the site's own profiles cannot know that one is missing: a folder or a file that cannot be
    read makes every mistake a doubt.
    """
    named = [
        (("ups", ups, "sources", place, "profile"), source.profile)
        for ups, its in settings.ups.items()
        for place, source in enumerate(its.sources)
        if isinstance(source, SnmpOptions) and source.profile is not None
    ]
    if not named:
        return [], []
    profiles = load_profiles(site_folder)
    known = sorted(profile.name for profile in profiles.ranked())
    told: list[Mistake] = []
    for path, name in named:
        if name not in profiles.by_name:
            what = f"there is no profile {name!r} ({_hint(name, known)})"
            if profiles.problems:
                what += f"; or it is in what could not be read: {'; '.join(profiles.problems)}"
            told.append(Mistake(path, what))
    return ([], told) if profiles.problems else (told, [])


def _hint(name: str, known: list[str]) -> str:
    """Return the nearest name; "apc" is nearer to the families that begin with it than any count of letters says."""
    low = name.lower()
    near = [each for each in known if low and each.startswith(low)] or difflib.get_close_matches(low, known, n=1)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def secrets_in(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Secret]]:
    """Yield every secret that settings name, with the path of its setting: keys of maps and places in lists."""
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from secrets_in(getattr(value, name), (*path, name))
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from secrets_in(inner, (*path, key))


def _trouble(path: Path) -> str:
    """Return why a file is no place for a secret; "" if it is one. It is not opened. Raises PermissionError."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise
    except OSError as error:
        return f"{path}: {error.strerror} (put the secret there: install -m 0400 -o powerguard /dev/stdin {path})"
    if not stat.S_ISREG(mode):
        return f"{path}: is not a file (name the file that holds the secret)"
    if stat.S_IMODE(mode) & 0o077:
        return f"{path}: others can read this secret (chmod 0400 {path})"
    return ""
