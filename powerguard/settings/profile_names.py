"""Is there a profile of each name that the settings give? For `config validate`: the daemon starts without one, too.

One UPS whose profile is missing must not take the others from the daemon, so loading the settings does not ask this.
"""

import difflib
from pathlib import Path

from powerguard.profiles.load import SITE_FOLDER, load_profiles
from powerguard.settings.explain import Mistake
from powerguard.settings.load import Loaded
from powerguard.sources.snmp_options import SnmpOptions
from powerguard.strictyaml import KeyPath


def unknown_profiles(loaded: Loaded, site_folder: Path = SITE_FOLDER) -> tuple[list[str], list[str]]:
    """Return what is wrong with the profiles that are named, and what could not be found out. Lines, with their place.

    Nobody who may not read the site's own profiles can tell that one is missing: a folder or a file that is not read
    makes every mistake a doubt.
    """
    named = list(_named(loaded))
    if not named:
        return [], []
    profiles = load_profiles(site_folder)
    known = sorted(profile.name for profile in profiles.ranked())
    told: list[str] = []
    for path, name in named:
        if name not in profiles.by_name:
            what = f"there is no profile {name!r} ({_hint(name, known)})"
            if profiles.problems:
                what += f"; or it is in what could not be read: {'; '.join(profiles.problems)}"
            told.append(f"{loaded.files.where(path)}: {Mistake(path, what)}")
    return ([], told) if profiles.problems else (told, [])


def _named(loaded: Loaded) -> list[tuple[KeyPath, str]]:
    return [
        (("ups", ups, "sources", place, "profile"), source.profile)
        for ups, its in loaded.settings.ups.items()
        for place, source in enumerate(its.sources)
        if isinstance(source, SnmpOptions) and source.profile is not None
    ]


def _hint(name: str, known: list[str]) -> str:
    """Return the nearest name; "apc" is nearer to the families that begin with it than any count of letters says."""
    low = name.lower()
    near = [each for each in known if low and each.startswith(low)] or difflib.get_close_matches(low, known, n=1)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
