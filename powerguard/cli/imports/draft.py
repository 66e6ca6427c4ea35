"""What `powerguard import` reads files with, and what it makes: settings, what to look at, and which secrets to keep.

No content is ever part of a message: any word may be a password in the wrong place.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FORCE_AFTER_S: Final = 110.0
"""Default of `host.force_after_s`: how long this host may take to stop."""
RESERVE_S: Final = 60.0
CHECKPOINT_S: Final = 60.0
"""Presumed seconds of a checkpoint, until they are set or measured."""
MAX_BYTES: Final = 1 << 20
SECRETS: Final = "/etc/powerguard/secrets"
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9]{1,3}(\.[0-9]{1,3}){3}")
_NAME: Final = re.compile(r"[^a-z0-9_.-]+")
HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:.]{2,45}")
_WORDS: Final = frozenset(("true", "false", "null"))

Scalar = str | int | float | bool
Source = dict[str, Any]


class ReadError(Exception):
    """A file that cannot be read: which, why, and the fix."""


@dataclass(frozen=True, slots=True)
class Line:
    """Words of one line. number: of the line in which the first of them begins, from 1."""

    file: str
    number: int
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        """Say "file:line"."""
        return f"{self.file}:{self.number}"


def read(path: Path) -> str:
    """Return a file's text, one character a byte. Raises ReadError."""
    try:
        # NONBLOCK: a pipe or a device that was named by mistake does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                msg = f"{path}: is not a file"
                raise ReadError(msg)
            raw = b""
            while len(raw) <= MAX_BYTES and (chunk := os.read(descriptor, MAX_BYTES + 1 - len(raw))):
                raw += chunk
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = " (it holds passwords: run this as root)" if isinstance(error, PermissionError) else ""
        msg = f"{path}: cannot be read: {reason}{hint}"
        raise ReadError(msg) from error
    if len(raw) > MAX_BYTES:
        msg = f"{path}: is larger than {MAX_BYTES} bytes, so it is not a file of NUT or apcupsd"
        raise ReadError(msg)
    return raw.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Finding:
    """One warning or note. name: a word for programs; where: file:line, or the file if it is not set.

    is_note: it is not an error, but has no equivalent here, and why.
    """

    name: str
    where: str
    what: str
    right: str = ""
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class DraftSecret:
    """A secret that must be kept in a file. what: its use; found: its present place."""

    name: str
    what: str
    found: str


@dataclass(slots=True)
class Ups:
    """One UPS to be. supplies: how many power supplies of this host hang on it. about: comments over its sources.

    sheet: what the data sheet of its model says, and comments on that; empty where the model is not known.
    """

    name: str
    sources: list[Source]
    where: str
    supplies: int = 1
    about: list[str] = field(default_factory=list)
    options: dict[str, Scalar] = field(default_factory=dict)
    sheet: dict[str, Any] = field(default_factory=dict)
    about_sheet: list[str] = field(default_factory=list)


class Draft:
    """Gathers all that one import makes."""

    def __init__(self, checkpoint_s: float = CHECKPOINT_S, secrets_in: str | None = None) -> None:
        """Begin. secrets_in: a folder makes {file: ...} of secrets; None makes {credential: ...}."""
        self.checkpoint_s = checkpoint_s
        self.upses: list[Ups] = []
        self.minimum_supplies = 1
        self.budget: dict[str, Scalar] = {}
        self.about_budget: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.files: list[str] = []
        self.kept: list[DraftSecret] = []
        self._secrets_in = secrets_in
        self._known: dict[tuple[str, str], str] = {}

    def warn(self, name: str, where: str, what: str, right: str) -> None:
        """Add a warning."""
        self._add(Finding(name, where, what, right))

    def note(self, name: str, where: str, what: str) -> None:
        """Add a note on a directive without an equivalent."""
        self._add(Finding(name, where, what, is_note=True))

    def _add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def presume_feeds(self) -> None:
        """Warn if the files do not say which of several UPSes feed this host: all of them are taken."""
        if len(self.upses) > 1:
            names = ", ".join(ups.name for ups in self.upses)
            self.warn(
                "feeds_presumed",
                self.upses[-1].where,
                f"no file says which of {names} feed this host: the settings presume that each one alone carries it",
                "feeds: {supplies: [the UPS of each power supply of this host]}",
            )

    def secret(self, kind: str, value: str, ups: str, what: str, found: str) -> dict[str, str]:
        """Return the settings' reference to a secret. The same one is kept once. Its value is never stored."""
        name = self._known.get((kind, value))
        if name is None:
            taken = set(self._known.values())
            name = kind if kind not in taken else f"{kind}-{ups}"
            while name in taken:
                name += "-2"
            self._known[kind, value] = name
            self.kept.append(DraftSecret(name, what, found))
        return {"credential": name} if self._secrets_in is None else {"file": f"{self._secrets_in}/{name}"}

    def folder(self) -> str:
        """Return the folder in which the secrets are kept."""
        return SECRETS if self._secrets_in is None else self._secrets_in

    def name_for(self, wanted: str) -> str:
        """Return a valid name that no other UPS of the draft has."""
        name = _NAME.sub("-", wanted.lower()).lstrip("_.-")[:28] or "ups"
        taken = {ups.name for ups in self.upses}
        again, number = name, 2
        while again in taken:
            again, number = f"{name}-{number}", number + 1
        return again

    def settings(self) -> dict[str, Any]:
        """Return the settings as data."""
        made: dict[str, Any] = {
            "mode": "dry-run",
            "ups": {ups.name: {"sources": ups.sources, **ups.options, **ups.sheet} for ups in self.upses},
        }
        supplies = [ups.name for ups in self.upses for _ in range(ups.supplies)]
        if len(self.upses) > 1 or len(supplies) > 1 or self.minimum_supplies > 1:
            made["feeds"] = {"supplies": supplies, "minimum_supplies": self.minimum_supplies}
        if self.budget:
            made["budget"] = dict(self.budget)
        return made


# --- As YAML ----------------------------------------------------------------------------------------------------------


def scalar(value: object) -> str:
    """Return a value as our YAML has it; text in quotes wherever it could be read as something else."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:g}" if float(value).is_integer() else repr(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text not in _WORDS else json.dumps(text)


def as_yaml(draft: Draft, program: str) -> str:
    """Return the settings as a file with comments: its origin, and the settings that are still missing."""
    made = draft.settings()
    lines = [
        f"# Made by `powerguard import {program}` from:",
        *(f"#   {_safe(file)}" for file in draft.files),
        "# NUT and apcupsd have no settings for training, the BMC or the real battery runtime. The missing settings",
        f"# are named below; docs/guides/{program}.md describes the next steps.",
        "",
        "mode: dry-run                     # then rehearse, then armed",
        "",
        "ups:",
    ]
    for ups in draft.upses:
        lines += [f"  {scalar(ups.name)}:", "    sources:"]
        lines += [f"      # {_safe(text)}" for text in ups.about]
        lines += [f"      - {scalar(source)}" for source in ups.sources]
        lines += [f"    # {_safe(text)}" for text in ups.about_sheet]
        lines += [f"    {key}: {scalar(value)}" for key, value in {**ups.options, **ups.sheet}.items()]
        if not ups.sheet:
            lines.append(
                "    #runtime_table: {50: 540, 75: 360, 100: 240}   # load in percent: seconds; from the data sheet"
            )
            lines.append("    #rating_w: 5400                                # watts, not VA")
    lines.append("")
    if "feeds" in made:
        lines += [f"feeds: {scalar(made['feeds'])}", ""]
    lines += ["#trainers:", '#  - {name: llm, url: "unix:/run/powerguard-trainers/llm.sock", after: pause}', ""]
    if draft.budget:
        lines.append("budget:")
        for key, value in draft.budget.items():
            about = draft.about_budget.get(key, "")
            lines.append(f"  {key}: {scalar(value)}" + (f"    # {_safe(about)}" if about else ""))
        lines.append("")
    lines.append(
        "#bmc: {kind: auto}    # this host's own; over the network also host, user, password: {credential: bmc}"
    )
    return "\n".join(lines) + "\n"


def _safe(text: str) -> str:
    """Return text that stays within a comment of one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def number(text: str) -> float | None:
    """Return a plain number of seconds, minutes or percent; None if the text is not one."""
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) else None


def source_at(kind: str, host: str, port: str, usual: int) -> Source | None:
    """Return a source with its host, and its port if it is not the usual one; None if that is not an address."""
    if not HOST.fullmatch(host) or not re.fullmatch(r"[0-9]{0,5}", port):
        return None
    found = int(port or usual)
    if not 0 < found < 65536:
        return None
    return {"kind": kind, "host": host} | ({} if found == usual else {"port": found})
