"""What was found, as settings that our own loader takes."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from powerguard.settings.ups_models import from_data_sheet
from powerguard.sources.discover import Found, merged

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


def settings_of(found: Sequence[Found]) -> dict[str, Any] | None:
    """Return the settings as data; None where no UPS was found."""
    upses = {name: {"sources": [one.source for one in group], **_known(group)[0]} for name, group in _named(found)}
    if not upses:
        return None
    made: dict[str, Any] = {"mode": "dry-run", "ups": upses}
    if len(upses) > 1:
        made["feeds"] = {"supplies": [next(iter(upses))]}
    return made


def as_yaml(found: Sequence[Found]) -> str:
    """Return the settings as a file with comments; "" where no UPS was found."""
    named = _named(found)
    if not named:
        return ""
    lines = ["mode: dry-run          # armed, once `powerguard doctor` is content", "", "ups:"]
    for name, group in named:
        lines += [f"  {scalar(name)}:", "    sources:"]
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
