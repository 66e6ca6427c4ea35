"""Warnings about valid settings that leave a gap: for `config validate`, doctor, and the daemon's start.

Also whether the profiles, certificates and files with secrets in the settings exist, for `config validate`.

The daemon starts without them: one UPS whose profile or secret is missing must not stop the others.
"""

import difflib
import ipaddress
import os
import ssl
import stat
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path, PurePath
from typing import Final

from pydantic import BaseModel

from powerguard.effectors.options import ResumeOptions
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.options import NO_USER, SECRETS, Secret
from powerguard.settings.explain import Mistake
from powerguard.settings.notify import TemplateError, WebhookOptions, read_template
from powerguard.settings.policy import OLD_MONTHS, battery_age_months
from powerguard.settings.schema import Settings, SourceOptions, UpsOptions
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.base import LOOPBACK
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.profiles.load import SITE_FOLDER, load_profiles
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.yamlfile import KeyPath


def missing(settings: Settings, site_folder: Path = SITE_FOLDER) -> tuple[list[Mistake], list[Mistake]]:
    """Return names in the settings that do not exist on this host, and names that could not be checked."""
    mistakes, doubts = _profiles(settings, site_folder)
    files = [
        *(((*path, "file"), secret.file, _trouble) for path, secret in secrets_in(settings) if secret.file is not None),
        *((path, file, authority_trouble) for path, file in authorities_in(settings)),
    ]
    for path, file, trouble_of in files:
        try:
            trouble = trouble_of(Path(file))
        except PermissionError:
            doubts.append(Mistake(path, "not checked: permission denied (run this as root)"))
        else:
            mistakes += [Mistake(path, trouble)] if trouble else []
    for name, target in settings.notify.targets.items():
        if isinstance(target, WebhookOptions) and target.template is not None:
            path = ("notify", "targets", name, "template")
            try:
                read_template(target)
            except PermissionError:
                doubts.append(Mistake(path, "not checked: permission denied (run this as root)"))
            except OSError as error:
                mistakes.append(
                    Mistake(path, f"{target.template}: {error.strerror} (put the body of the message there)")
                )
            except TemplateError as error:
                mistakes.append(Mistake(path, str(error)))
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
    mistakes: list[Mistake] = []
    for path, name in named:
        if name not in profiles.by_name:
            what = f"unknown profile {name!r} ({_hint(name, known)})"
            if profiles.problems:
                what += f"; or it is in what could not be read: {'; '.join(profiles.problems)}"
            mistakes.append(Mistake(path, what))
    return ([], mistakes) if profiles.problems else (mistakes, [])


def _hint(name: str, known: list[str]) -> str:
    """Return the nearest name; "apc" is nearer to the families that begin with it than any count of letters says."""
    low = name.lower()
    near = [each for each in known if low and each.startswith(low)] or difflib.get_close_matches(low, known, n=1)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def secrets_in(settings: object) -> Iterator[tuple[KeyPath, Secret]]:
    """Yield every secret that settings name, with the path of its setting: keys of maps and places in lists."""
    return ((path, value) for path, value in _fields(settings, ()) if isinstance(value, Secret))


def authorities_in(settings: object) -> Iterator[tuple[KeyPath, str]]:
    """Yield every file with certificates of authorities that settings name, with the path of its setting."""
    named = ((path, value) for path, value in _fields(settings, ()) if path[-1] in {"ca", "ca_file"})
    return ((path, value) for path, value in named if isinstance(value, str))


def _fields(value: object, path: KeyPath, *, is_field: bool = True) -> Iterator[tuple[KeyPath, object]]:
    """Yield the values of fields, and all secrets: the keys of a map are the user's own words, such as labels."""
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _fields(getattr(value, name), (*path, name))
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _fields(inner, (*path, key), is_field=False)
    elif is_field:
        yield path, value


def is_roots(file: str) -> bool:
    """Return whether a file is where only root can read it, which systemd does for a credential."""
    return os.path.normpath(file).startswith(f"{SECRETS}/")


def _trouble(path: Path) -> str:
    """Return why a file is not suitable for a secret; "" if it is. It is not opened. Raises PermissionError."""
    if is_roots(str(path)):
        return f"{path}: only root may enter {SECRETS} (write {{credential: {path.name}}})"
    try:
        mode = path.stat().st_mode
    except PermissionError:
        raise
    except OSError as error:
        return f"{path}: {error.strerror} (put the secret there: install -m 0400 -o powerguard /dev/stdin {path})"
    if not stat.S_ISREG(mode):
        return f"{path}: is not a file (name the file that holds the secret)"
    if stat.S_IMODE(mode) & 0o077:
        return f"{path}: other users can read this secret (chmod 0400 {path})"
    return ""


def authority_trouble(path: Path) -> str:
    """Return why a file is not suitable for the certificate of an authority; "" if it is. Raises PermissionError."""
    try:
        ssl.create_default_context(cafile=path)
    except PermissionError:
        raise
    except ssl.SSLError:
        return f"{path}: has no certificate in PEM (copy the one of the authority there)"
    except OSError as error:
        return f"{path}: {error.strerror} (copy the authority's certificate there, in PEM)"
    return ""


_SLOW_POLL_S: Final = 2.0
_SLIM_MARGIN: Final = 0.1
_SLIM_RESERVE_S: Final = 20.0
_QUICK_RECHARGE_H: Final = 1.0
_AUTHENTICATED_VERSION: Final = 3


def warnings(settings: Settings, *, today: date) -> list[Mistake]:
    """Return the settings that reduce the protection, each with its path and the better value."""
    found = [*_host(settings), *_trainers(settings), *_budget(settings), *_idle(settings)]
    for name, ups in settings.ups.items():
        if name not in settings.feeding:
            found.append(Mistake(("ups", name), "is not in feeds.supplies, so it is not read"))
        else:
            found += _ups(name, ups, today)
    return found


def _ups(name: str, ups: UpsOptions, today: date) -> Iterator[Mistake]:
    for place, source in enumerate(ups.sources):
        path = ("ups", name, "sources", place)
        yield from _forgeable(path, source)
        if source.poll_s > _SLOW_POLL_S:
            yield Mistake(
                (*path, "poll_s"),
                f"an outage is seen up to {2 * source.poll_s:g} s late (better: 1 to {_SLOW_POLL_S:g})",
            )
    if ups.runtime_table is None and ups.battery_wh is not None:
        yield Mistake(
            ("ups", name, "runtime_table"),
            "not set, so it is made from battery_wh, which counts half of a good battery or less (copy the table of "
            "the data sheet)",
        )
    elif ups.runtime_table is None:
        yield Mistake(
            ("ups", name, "runtime_table"),
            "not set, so the runtime that the UPS reports is trusted at every load (copy the table of the data sheet)",
        )
    age = battery_age_months(ups.battery_installed, today)
    if age is not None and age < 0:
        yield Mistake(("ups", name, "battery_installed"), f"{ups.battery_installed} lies in the future")
    elif age is not None and age > OLD_MONTHS:
        yield Mistake(
            ("ups", name, "battery_installed"),
            "the battery is older than 3 years, so only 60 % of it counts (replace it)",
        )


def _forgeable(path: KeyPath, source: SourceOptions) -> Iterator[Mistake]:
    """Say how the answers of a source could be forged, or its password overheard."""
    match source:
        case SnmpOptions():
            if source.version != _AUTHENTICATED_VERSION:
                yield Mistake(
                    (*path, "version"),
                    f"SNMP version {source.version} answers can be forged by every host on that network (better: "
                    "version 3 with auth, or a separate network)",
                )
            elif source.auth is None:
                yield Mistake((*path, "auth"), "version 3 without auth can be forged like version 1 (set auth)")
        case NutOptions():
            if source.tls != "required" and source.host not in LOOPBACK:
                yield Mistake(
                    (*path, "tls"),
                    f"{source.tls}: upsd's answers can be forged, and its password read, by every host on that network "
                    "(better: required, or a separate network)",
                )
        case ApcupsdOptions():
            if source.host not in LOOPBACK:
                yield Mistake(
                    (*path, "host"),
                    "apcupsd has no authentication, so every host on that network can forge its answers (better: the "
                    "UPS's own card, or a separate network)",
                )


def _host(settings: Settings) -> Iterator[Mistake]:
    if settings.bmc.kind == "none":
        yield Mistake(("bmc", "kind"), "none: the host may stay off when power returns (better: auto)")
    elif settings.bmc.policy == "observe":
        yield Mistake(("bmc", "policy"), "observe only reads the power restore policy (better: ensure)")
    if not ipaddress.ip_address(settings.http.listen).is_loopback:
        yield Mistake(("http", "listen"), "every client that reaches this address can read status and metrics")


def _trainers(settings: Settings) -> Iterator[Mistake]:
    if not settings.trainers and settings.trainer_sockets is None:
        yield Mistake(("trainers",), "none, and trainer_sockets is null: no training is asked for a checkpoint")
    yield from unknown_users(settings)
    for place, trainer in enumerate(settings.trainers):
        if not isinstance(trainer, TrainerOptions) or trainer.uids is not None:
            continue
        path = trainer.socket_path
        if path is not None and str(PurePath(path).parent) == settings.trainer_sockets:
            yield Mistake(
                ("trainers", place, "uids"),
                f"not set, and every user may put a socket into {settings.trainer_sockets}: the first one is "
                f"accepted as {trainer.name} (better: uids: [user id of the job])",
            )


def unknown_users(settings: Settings) -> Iterator[Mistake]:
    """Yield a caution for each user whose name was not known when the settings were read."""
    yield from _unknown(("trainer_uids",), settings.trainer_uids)
    for place, trainer in enumerate(settings.trainers):
        if isinstance(trainer, TrainerOptions):
            yield from _unknown(("trainers", place, "uids"), trainer.uids or ())


def _unknown(path: KeyPath, uids: Sequence[int]) -> Iterator[Mistake]:
    for place, uid in enumerate(uids):
        if uid == NO_USER:
            yield Mistake(
                (*path, place),
                "unknown user, so its sockets are not accepted until `id` knows the name",
            )


def _budget(settings: Settings) -> Iterator[Mistake]:
    if settings.budget.margin < _SLIM_MARGIN:
        yield Mistake(
            ("budget", "margin"), f"below {_SLIM_MARGIN:g}: an error of a gauge can cost the host (better: 0.2)"
        )
    if settings.budget.reserve_s < _SLIM_RESERVE_S:
        yield Mistake(
            ("budget", "reserve_s"), f"below {_SLIM_RESERVE_S:g} s: one slow service can cost the host (better: 60)"
        )
    if settings.budget.recharge_h < _QUICK_RECHARGE_H:
        yield Mistake(("budget", "recharge_h"), "less than an hour: only supercapacitors charge that fast (better: 8)")


KINDS: Final = {"rtc": "device", "sentinel": "http", "gpu": "nvml", "scheduler": "slurm"}
"""Blocks that do nothing by default, and the kind with which they do something."""
_USED_ANYWAY: Final = frozenset(("node", "socket"))
"""Settings that are read without a kind, too: by `powerguard scheduler topology`, the host check and doctor."""


def _idle(settings: Settings) -> Iterator[Mistake]:
    """Name what was set and does nothing: in a block whose kind is none (forgotten, mostly), in bmc and in resume."""
    for block, kind in KINDS.items():
        options = getattr(settings, block)
        if options.kind != "none":
            continue
        plain = type(options)()
        keys = [key for key in type(options).model_fields if key not in _USED_ANYWAY]
        yield from (
            Mistake((block, key), f"has no effect, because {block}.kind is none (write kind: {kind}, or remove it)")
            for key in keys
            if getattr(options, key) != getattr(plain, key)
        )
    bmc = settings.bmc
    if bmc.kind not in {"auto", "redfish"}:
        yield from (
            Mistake(("bmc", key), f"has no effect, because bmc.kind is {bmc.kind}, without Redfish (remove it)")
            for key in ("ca", "fingerprint", "system")
            if getattr(bmc, key) is not None
        )
    resume, plain_resume = settings.resume, ResumeOptions()
    if resume.after_unseen_stop == "if-confirmed" and bmc.kind in {"none", "redfish"}:
        yield Mistake(
            ("resume", "after_unseen_stop"),
            f"if-confirmed never starts training, because bmc.kind {bmc.kind} does not report a loss of AC "
            "(write start or never)",
        )
    if resume.by == "scheduler":
        yield from (
            Mistake(("resume", key), "has no effect, because resume.by is scheduler (write by: host, or remove it)")
            for key in ("target", "command")
            if getattr(resume, key) != getattr(plain_resume, key)
        )
    elif settings.scheduler.kind != "none" and "by" not in resume.model_fields_set:
        yield Mistake(
            ("resume", "by"),
            "not set, so powerguard starts a unit of this host after a power-off, besides the jobs that "
            f"scheduler.kind: {settings.scheduler.kind} starts (write by: scheduler; or by: host, if that is wanted)",
        )
    elif resume.command and resume.target != plain_resume.target:
        yield Mistake(("resume", "target"), "has no effect, because resume.command is run instead (remove one of them)")
