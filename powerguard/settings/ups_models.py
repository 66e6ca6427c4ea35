"""UPS models by name: the known ones, and those of the site."""

import difflib
import functools
from collections.abc import Iterable
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from powerguard.options import Options
from powerguard.settings.load import Files, SettingsError, validate
from powerguard.settings.schema import LoadPct, RuntimeS, falls_with_load
from powerguard.yamlfile import Document, YamlFileError, load, load_file

SITE_FILE: Final = Path("/etc/powerguard/ups-models.yaml")
_MAKERS: Final = {
    "americanpowerconversion": "apc",
    "schneiderelectric": "apc",
    "apc": "apc",
    "cyberpowersystems": "cyberpower",
    "cyberpower": "cyberpower",
    "cps": "cyberpower",
    "eaton": "eaton",
    "tripplite": "eaton",
    "vertiv": "vertiv",
    "liebert": "vertiv",
    "emerson": "vertiv",
    "riello": "riello",
    "huawei": "huawei",
}
"""Names of makers as UPSes and people write them, without spaces and capitals; two of one owner are one maker."""
_CLOSE: Final = 0.7
_SHORTEST_PART: Final = 4
_SAME_RATING: Final = 0.02
_Name = Annotated[str, Field(min_length=1, max_length=64)]


class Origin(StrEnum):
    """maker: a data sheet, or a test of a new battery. gauge: one such UPS reported it, with a battery of any age."""

    MAKER = "maker"
    GAUGE = "gauge"


class UpsModel(Options):
    """The known figures of one model without external packs."""

    also: list[_Name] = Field(default_factory=list, max_length=32, description="Other names of it.")
    origin: Origin = Field(default=Origin.MAKER, description="gauge: a UPS of this model reported the runtimes.")
    rating_w: float = Field(ge=100, le=2_000_000, description="Rated output in watts (not VA).", examples=[6000])
    runtime_table: dict[LoadPct, RuntimeS] | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        description="Runtime of a new, full battery: load in percent of the rating, and seconds.",
        examples=[{50: 540, 75: 360, 100: 240}],
        json_schema_extra={"x-keys": "a load in percent of the rating, above 0, at most 150"},
    )
    runtime_by_w: dict[Annotated[float, Field(gt=0)], RuntimeS] | None = Field(
        default=None,
        min_length=1,
        max_length=32,
        description="The same by load in watts, where the data sheet has it so: instead of runtime_table.",
        examples=[{100: 3840, 300: 1350}],
        json_schema_extra={"x-keys": "a load in watts"},
    )
    source: str = Field(min_length=1, max_length=200, description="Which document the figures come from.")
    where: str = Field(default="", max_length=200, description="Where it was read: an address.")
    read: str = Field(
        default="",
        pattern=r"^(20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01]))?$",
        description="The day on which it was read.",
        examples=["2026-11-23"],
    )

    @model_validator(mode="after")
    def _one_table_that_falls(self) -> Self:
        if (self.runtime_table is None) == (self.runtime_by_w is None):
            msg = "give runtime_table (load in percent: seconds) or runtime_by_w (load in watts: seconds), one of them"
            raise ValueError(msg)
        falls_with_load(self.table)
        return self

    @property
    def table(self) -> dict[float, float]:
        """Runtime in seconds by load in percent of the rating, lowest load first."""
        if self.runtime_table is not None:
            return dict(sorted(self.runtime_table.items()))
        by_w = self.runtime_by_w or {}
        return {round(100 * watts / self.rating_w, 4): runtime_s for watts, runtime_s in sorted(by_w.items())}


class Catalogue(Options):
    """A file of models."""

    models: dict[_Name, UpsModel] = Field(description="The models, by name.")


def known_models(site_file: Path | None = None) -> dict[str, UpsModel]:
    """Return all models by name: ours, and those of the site's file over them.

    site_file: None: SITE_FILE where there is one. Raises SettingsError with every mistake of the site's file, and where
    a named file cannot be read.
    """
    models = dict(_packaged())
    if site_file is None and not SITE_FILE.is_file():
        return models
    try:
        document = load_file(SITE_FILE if site_file is None else site_file)
    except YamlFileError as error:
        raise SettingsError([str(problem) for problem in error.problems]) from None
    return models | _checked(document)


@functools.cache
def _packaged() -> dict[str, UpsModel]:
    text = (resources.files("powerguard.settings") / "ups-models.yaml").read_text(encoding="utf-8")
    return _checked(load(text, "ups-models.yaml"))


def models_named(models: dict[str, UpsModel], wanted: str) -> list[str]:
    """Return the models that have this name, however it is spaced, capitalised and hyphenated, with or without maker.

    Several where a name is shared: by models of other makers, or of another voltage or form.
    """
    maker, key = _key(wanted)
    if not key:
        return []
    own = [name for name in models if _key(name) == (maker, key)]
    return own or [
        name
        for name, model in models.items()
        for its_maker in [_key(name)[0]]
        if key in {_key(each)[1] for each in (name, *model.also)} and not (maker and its_maker and maker != its_maker)
    ]


def find_model(models: dict[str, UpsModel], wanted: str) -> tuple[str, UpsModel]:
    """Return the model that has this name. Raises LookupError, whose text names those that fit or come close."""
    fitting = models_named(models, wanted)
    if len(fitting) == 1:
        return fitting[0], models[fitting[0]]
    if fitting:
        msg = f"{wanted[:64]!r} may be {' or '.join(sorted(fitting))}: give the full name"
        raise LookupError(msg)
    close = closest(models, wanted)
    hint = f": did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(sorted(models))}"
    msg = f"{wanted[:64]!r} is not a known model{hint}"
    raise LookupError(msg)


def closest(models: dict[str, UpsModel], wanted: str) -> list[str]:
    """Return at most three models whose names come close, the closest first, a maker's figures before a gauge's."""
    key = _key(wanted[:64])[1]
    names = {name: [_key(each)[1] for each in (name, *model.also)] for name, model in models.items()}
    scores = {name: max(_likeness(key, each) for each in keys) for name, keys in names.items()}
    order = sorted(scores, key=lambda name: (-scores[name], models[name].origin is Origin.GAUGE, name))
    return [name for name in order if scores[name] >= _CLOSE][:3]


def _likeness(key: str, other: str) -> float:
    """Return 0 to 1; a name that was cut short counts as close."""
    ratio = difflib.SequenceMatcher(None, key, other, autojunk=False).ratio()
    return max(ratio, _CLOSE) if len(key) >= _SHORTEST_PART and key in other else ratio


def from_data_sheet(
    reported: Iterable[str], rating_w: float | None = None, *, site_file: Path | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the data sheet of a reported model gives a UPS, and comments on them; or two empty ones.

    reported: the names by which the UPS identifies itself. rating_w: the rating that it reports, watts; a model of
    another rating is not meant. A name that several models share has no result, and so has a model known only from a
    gauge, because this UPS has its own. A site's file with mistakes gives a comment alone.
    site_file: as in known_models.
    """
    try:
        models = known_models(site_file)
    except SettingsError:
        return {}, [f"{site_file or SITE_FILE} has mistakes, so that no data sheet was looked up"]
    rated = "" if rating_w is None else f" {rating_w:g}W"
    names = {name for text in reported for word in (text, text + rated) for name in models_named(models, word)}
    fitting = [name for name in names if rating_w is None or _is_near(rating_w, models[name].rating_w)]
    if any(models[name].origin is Origin.GAUGE for name in fitting):
        return {}, []
    if len(fitting) != 1:
        return {}, []
    (name,) = fitting
    model = models[name]
    comments = [f"{name}: {model.source}", model.where, f"read {model.read}" if model.read else ""]
    comments.append("of a new battery, without external packs: with packs, write your own table")
    table = {_plain(load_pct): _plain(runtime_s) for load_pct, runtime_s in model.table.items()}
    return {"runtime_table": table, "rating_w": _plain(model.rating_w)}, [*filter(None, comments)]


def _is_near(rating_w: float, its_w: float) -> bool:
    return abs(rating_w - its_w) <= _SAME_RATING * its_w


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _key(name: str) -> tuple[str, str]:
    """Return the maker, "" where the name has none, and the model, both in small letters and digits alone."""
    rest = "".join(letter for letter in name.casefold() if letter.isalnum())
    maker = ""
    while word := next((word for word in _MAKERS if rest.startswith(word) and rest != word), ""):
        maker, rest = _MAKERS[word], rest.removeprefix(word)
    return maker, rest


def _checked(document: Document) -> dict[str, UpsModel]:
    files = Files(document.data, (document,), {})
    return validate(Catalogue, files, schema=_schema).models


def _schema() -> dict[str, Any]:
    return Catalogue.model_json_schema()
