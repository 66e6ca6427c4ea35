"""The files that `powerguard install` puts in place, from a checkout or a wheel, and the links that enable units."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import powerguard
from powerguard.options import SECRETS

PREFIX: Final = "/opt/powerguard"
"""Where units look for the program; replaced by where it really is."""
LIBRARY: Final = "/usr/lib/powerguard"
UNITS: Final = "/etc/systemd/system"
SETTINGS: Final = "/etc/powerguard/powerguard.yaml"
SYSTEM_PYTHON: Final = "/usr/bin/python3"
RESUME: Final = "powerguard-resume.target"

PROGRAMS: Final[Mapping[str, tuple[str, str]]] = {
    "powerguard-off": (f"{LIBRARY}/powerguard-off", "powers this host off by a deadline"),
    "powerguard-shutdown": ("/usr/lib/systemd/system-shutdown/powerguard", "the last step of a shutdown"),
    "powerguard-helper": (f"{LIBRARY}/powerguard-helper", "runs root helpers without other packages' code"),
    "powerguard-disarm": (f"{LIBRARY}/powerguard-disarm", "stops a watchdog that was left armed"),
}
CONFIGURATION: Final[Mapping[str, tuple[str, str]]] = {
    "powerguard.sysusers.conf": ("/usr/lib/sysusers.d/powerguard.conf", "the user and group of the daemon"),
    "powerguard.tmpfiles.conf": ("/usr/lib/tmpfiles.d/powerguard.conf", "folders in /run, /var/lib and /etc"),
    "powerguard.rules": ("/etc/polkit-1/rules.d/50-powerguard.rules", f"lets the daemon start {RESUME} only"),
    "powerguard.rtc.rules": ("/etc/udev/rules.d/60-powerguard-rtc.rules", "lets the daemon set the wake alarm"),
}
HOOKS: Final = ("apcupsd/powerguard-event", "nut/powerguard-notify", "nut/powerguard-shutdown")
MODULES: Final = (
    "powerguard-ipmi.modules.conf",
    "/etc/modules-load.d/powerguard-ipmi.conf",
    "kernel modules of the BMC",
)
SAMPLE: Final = "/usr/share/powerguard/powerguard.yaml"
SENTINEL: Final = "powerguard-sentinel.service"
SENTINEL_SETTINGS: Final = "/etc/powerguard/sentinel.yaml"
SENTINEL_SAMPLE: Final = "/usr/share/powerguard/sentinel.yaml"
SENTINEL_AT_BOOT: Final = f"{UNITS}/multi-user.target.wants/{SENTINEL}"
"""Never made here: a person decides which host is a sentinel."""

TRAINERS: Final = "/run/powerguard-trainers"
TRAINERS_MOUNT: Final = r"run-powerguard\x2dtrainers.mount"
"""Unit name of the tmpfs on TRAINERS: systemd derives it from the path."""
RENAMED: Final[Mapping[str, str]] = {"powerguard-trainers.mount": TRAINERS_MOUNT}
"""Units whose file cannot be kept under the unit's name: some tools take a backslash for a separator."""

ALWAYS: Final = ("powerguard-off.socket", TRAINERS_MOUNT)
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "ipmi": ("powerguard-ipmi.socket", "powerguard-disarm.service"),
    "gpu": ("powerguard-gpu.socket", "powerguard-gpu-watch.path"),
    "signals": ("powerguard-signal.socket", "powerguard-signal-watch.path"),
    "slurm": ("powerguard-slurm.socket",),
}
"""Parts that are enabled only on request; ipmi also if there is a BMC."""
DAEMON: Final = "powerguard.service"
CREDENTIALS: Final = f"{UNITS}/{DAEMON}.d/50-credentials.conf"
AT_BOOT: Final = f"{UNITS}/multi-user.target.wants/{DAEMON}"
COMMANDS: Final = {
    "powerguard": "/usr/local/bin",
    "powerguard-gpu": "/usr/local/sbin",
    "powerguard-ipmi": "/usr/local/sbin",
    "powerguard-signal": "/usr/local/sbin",
    "powerguard-slurm": "/usr/local/sbin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    """One file or link. path: on the installed system; link: what it points to, "" for a file.

    is_choice: asked for by name; stays until uninstall, whether it is asked for again or not.
    """

    path: str
    what: str
    content: bytes = b""
    mode: int = 0o644
    link: str = ""
    is_choice: bool = False


class SourceError(Exception):
    """A file to install is missing in this package."""


def source(folder: str) -> Path:
    """Return `systemd` or `config`, of a wheel (inside the package) or a checkout (next to it)."""
    package = Path(powerguard.__file__).parent
    for place in (package, package.parent):
        if (place / folder / {"systemd": DAEMON, "config": "powerguard.yaml"}[folder]).is_file():
            return place / folder
    msg = f"{package}: its folder {folder} is missing: install it with pip, or from a complete checkout"
    raise SourceError(msg)


def pieces(root: Path, prefix: str, parts: Collection[str], *, with_daemon: bool) -> list[InstalledFile]:
    """Return all that belongs on this system. parts: of PARTS; with_daemon: it starts at boot.

    Raises SourceError, OSError.
    """
    systemd, config = source("systemd"), source("config")
    python = SYSTEM_PYTHON if (root / SYSTEM_PYTHON[1:]).exists() else f"{prefix}/bin/python"
    made: list[InstalledFile] = []
    units: dict[str, bytes] = {}
    for path in sorted(systemd.iterdir()):
        name = RENAMED.get(path.name, path.name)
        if name in PROGRAMS:
            where, what = PROGRAMS[name]
            content = path.read_bytes()
            if root == Path("/"):
                content = content.replace(b"\nPLACES = ()", f"\nPLACES = {_unusual(prefix)!r}".encode())
            made.append(InstalledFile(path=where, what=what, content=content, mode=0o755))
        elif name in CONFIGURATION:
            where, what = CONFIGURATION[name]
            made.append(InstalledFile(path=where, what=what, content=path.read_bytes()))
        elif name == MODULES[0] and "ipmi" in parts:
            made.append(InstalledFile(path=MODULES[1], what=MODULES[2], content=path.read_bytes()))
        elif path.suffix in {".service", ".socket", ".path", ".target", ".mount"}:
            text = path.read_bytes().replace(f"={SYSTEM_PYTHON} ".encode(), f"={python} ".encode())
            units[name] = text.replace(f"{PREFIX}/".encode(), f"{prefix}/".encode())
            made.append(InstalledFile(path=f"{UNITS}/{name}", what=_description(units[name]), content=units[name]))
    for hook in HOOKS:
        content, what = (config / hook).read_bytes(), "hook script, unused until you configure it"
        made.append(InstalledFile(path=f"{LIBRARY}/{hook}", what=what, content=content, mode=0o755))
    made.append(InstalledFile(path=SAMPLE, what="sample settings", content=(config / "powerguard.yaml").read_bytes()))
    sample = (config / "sentinel.yaml").read_bytes()
    made.append(InstalledFile(path=SENTINEL_SAMPLE, what="sample settings of a sentinel", content=sample))
    enabled = [*ALWAYS, *(unit for part in PARTS if part in parts for unit in PARTS[part])]
    if with_daemon:
        enabled.append(DAEMON)
    made += [link for unit in enabled for link in _enabling(unit, units[unit])]
    for name, folder in COMMANDS.items():
        if os.path.lexists(root / prefix[1:] / "bin" / name):
            made.append(InstalledFile(path=f"{folder}/{name}", what="command", link=f"{prefix}/bin/{name}"))
    return made


def _unusual(prefix: str) -> tuple[str, ...]:
    """Return powerguard's folder, unless powerguard-helper searches it already."""
    place = Path(powerguard.__file__).resolve().parents[1]
    usual = Path(prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    return () if place == usual.resolve() else (str(place),)


def resume_pieces(units: tuple[str, ...]) -> list[InstalledFile]:
    """Return the files that let the daemon start these units, and stop after them."""
    if not units:
        return []
    head, named = "# By powerguard install --resume-unit\n[Unit]\n", ", ".join(units)
    wants = f"{head}Wants={' '.join(units)}\n".encode()
    before = f"{head}Before={' '.join(units)}\n".encode()
    return [
        InstalledFile(
            path=f"{UNITS}/{RESUME}.d/50-resume-units.conf",
            what=f"after a power-off the daemon starts {named}",
            content=wants,
            is_choice=True,
        ),
        InstalledFile(
            path=f"{UNITS}/{DAEMON}.d/50-resume-units.conf",
            what=f"the daemon outlives {named}",
            content=before,
            is_choice=True,
        ),
    ]


def credential_pieces(names: Collection[str]) -> list[InstalledFile]:
    """Return the file that gives the daemon these secrets; none without secrets."""
    if not names:
        return []
    lines = ["# By powerguard install. The daemon starts without a secret that is missing.", "[Service]"]
    for name in names:
        lines += [f"LoadCredential={name}:{SECRETS}/{name}", f"SetCredential={name}:\\n"]
    what = f"gives the daemon its secrets: {', '.join(names)}"
    return [InstalledFile(path=CREDENTIALS, what=what, content=("\n".join(lines) + "\n").encode())]


def _enabling(unit: str, text: bytes) -> Iterator[InstalledFile]:
    """Links as `systemctl enable` makes them, of the unit's own [Install] section."""
    for target in re.findall(r"^WantedBy=(\S+)$", text.decode(), re.MULTILINE):
        yield InstalledFile(path=f"{UNITS}/{target}.wants/{unit}", what="enabled", link=f"{UNITS}/{unit}")


def _description(text: bytes) -> str:
    found = re.search(r"^Description=powerguard: (.+)$", text.decode(), re.MULTILINE)
    return found[1] if found else "unit"
