"""What was found, as settings that our own loader takes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from powerguard.settings.ups_models import from_data_sheet
from powerguard.sources.discover import Found, alike, merged

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9]{1,3}(\.[0-9]{1,3}){3}")
_WORDS: Final = frozenset(("true", "false", "null"))
_NAME: Final = re.compile(r"[^a-z0-9]+")


def scalar(value: object) -> str:
    """Return a value as our YAML has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text not in _WORDS else json.dumps(text)


def as_credentials(found: Sequence[Found], given: Mapping[str, Any]) -> tuple[list[Found], dict[str, str]]:
    """Name the secrets that the caller has given as the daemon will have them.

    given: the options of SNMP from the command line. Return what was found, and by the name of each credential that it
    needs the file that the caller keeps it in, which the daemon's user cannot read.
    """
    files = {key: value["file"] for key, value in given.items() if isinstance(value, Mapping)}
    needed: dict[str, str] = {}
    told = []
    for one in found:
        source = one.source
        if source is not None and one.kind == "snmp":
            own = [key for key, file in files.items() if source.get(key) == {"file": file}]
            needed |= {f"snmp-{key}": files[key] for key in own}
            source = source | {key: {"credential": f"snmp-{key}"} for key in own}
        told.append(replace(one, source=source))
    return told, needed


def settings_of(found: Sequence[Found], *, bmc: bool = False) -> dict[str, Any] | None:
    """Return the settings as data; None where no UPS was found. bmc: this host has one."""
    upses = {name: {"sources": [one.source for one in group], **_known(group)[0]} for name, group in _named(found)}
    if not upses:
        return None
    made: dict[str, Any] = {"mode": "dry-run", "ups": upses}
    if len(upses) > 1:
        made["feeds"] = {"supplies": [next(iter(upses))]}
    return made | ({"bmc": {"kind": "auto"}} if bmc else {})


def as_yaml(found: Sequence[Found], *, bmc: bool = False) -> str:
    """Return the settings as a file with comments; "" where no UPS was found. bmc: this host has one."""
    named = _named(found)
    if not named:
        return ""
    lines = ["mode: dry-run          # then rehearse, then armed", "", "ups:"]
    for place, (name, group) in enumerate(named):
        lines += [f"  {scalar(name)}:"]
        again = [other for other, known in named[:place] if alike(known, group)]
        if again:
            lines.append(f"    # Is it the UPS {scalar(again[0])}, seen another way? Then its sources belong there.")
        lines += ["    sources:"]
        for one in group:
            about = ", ".join(filter(None, (one.model, one.profile, one.remark)))
            lines.append(f"      - {scalar(one.source)}" + (f"    # {about}" if about else ""))
        known, why = _known(group)
        lines += [f"    # {line}" for line in why]
        lines += [f"    {key}: {scalar(value)}" for key, value in known.items()] or [
            "    #runtime_table: {50: 540, 75: 360, 100: 240}    # load in percent: seconds; data sheet"
        ]
    if len(named) > 1:
        lines += ["", "# The UPSes that feed this host, one for each of its power supplies:"]
        lines.append(f"feeds: {{supplies: [{scalar(named[0][0])}]}}    # of: {', '.join(name for name, _ in named)}")
    # Over the network: kind: auto with host, user and password.
    lines += ["", f"{'' if bmc else '#'}bmc: {{kind: auto}}    # powers this host on again when power returns"]
    return "\n".join(lines) + "\n"


def _known(group: Sequence[Found]) -> tuple[dict[str, Any], list[str]]:
    """Return what the data sheet of this UPS says, by the model that its sources tell."""
    rating_w = next((one.rating_w for one in group if one.rating_w is not None), None)
    return from_data_sheet([one.model for one in group], rating_w)


def _named(found: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    """Give each UPS a name of its own: that which it has in NUT or apcupsd, else its maker and address."""
    named: dict[str, list[Found]] = {}
    for group in merged(found):
        first = next((one for one in group if one.name), group[0])
        wanted = first.name or f"{(first.profile or 'ups').split('-')[0].split(',')[0]}-{first.host}"
        name = _NAME.sub("-", wanted.lower()).strip("-")[:28] or "ups"
        again, number = name, 2
        while again in named:
            again, number = f"{name}-{number}", number + 1
        named[again] = group
    return list(named.items())
