"""Title and text of a message in the language of the settings, from texts/*.yaml."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from powerguard.yamlfile import load_file

FOLDER: Final = Path(__file__).with_name("texts")
_LONGEST_S: Final = 90 * 86400.0
Texts = Mapping[str, Any]


@cache
def texts(language: str) -> Texts:
    """Return the texts of a language: `messages`, `reasons`, `alarms` and `units`."""
    loaded: Texts = load_file(FOLDER / f"{language}.yaml").data
    return loaded


def word(language: str, name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return title and text of a message. A value that is missing or None is shown as unknown."""
    known = texts(language)
    message = known["messages"][name]
    shown = _Values({key: _shown(known, key, value) for key, value in values.items()})
    shown.unknown = known["units"]["unknown"]
    return message["title"].format_map(shown), message["text"].format_map(shown).strip()


def named(language: str, event: str, action: str = "") -> str:
    """Return what an alarm is called. action: the class of the order that failed, if one did."""
    name = event.removesuffix("_raised").removesuffix("_cleared").replace("_", " ")
    alarms = texts(language)["alarms"]
    return str(alarms.get(f"{name} {action}") or alarms.get(name, name))


class _Values(dict[str, str]):
    """Values of a text; what is not there is unknown."""

    unknown: str

    def __missing__(self, key: str) -> str:
        return self.unknown


def _shown(known: Texts, key: str, value: object) -> str:
    units = known["units"]
    if value is None:
        return str(units["unknown"])
    if key == "because":
        return str(known["reasons"].get(str(value), value))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if not key.endswith("_s"):
        return f"{value:.0f}"
    if not 0 <= value < _LONGEST_S:
        return str(units["unknown"])
    if value < 100:
        return f"{value:.0f} {units['seconds']}"
    return f"{value / 60:.0f} {units['minutes']}" if value < 6000 else f"{value / 3600:.1f} {units['hours']}"
