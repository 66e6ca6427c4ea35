"""UPS models by name: what is known of them beforehand, and what a site has added."""

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, field_validator

from powerguard.options import Options
from powerguard.settings.load import Files, SettingsError, validate
from powerguard.settings.schema import LoadPct, RuntimeS, falls_with_load
from powerguard.strictyaml import Document, StrictYamlError, load, load_file

SITE_FILE: Final = Path("/etc/powerguard/ups-models.yaml")
_Name = Annotated[str, Field(min_length=1, max_length=64)]


class UpsModel(Options):
    """What the data sheet says of one model, new and without external packs."""

    also: list[_Name] = Field(default_factory=list, max_length=32, description="Other names of it.")
    rating_w: float = Field(ge=100, le=2_000_000, description="Rated output in watts (not VA).", examples=[6000])
    runtime_table: dict[LoadPct, RuntimeS] = Field(
        min_length=1,
        max_length=32,
        description="Runtime of a new, full battery: load in percent of the rating, and seconds.",
        examples=[{50: 540, 75: 360, 100: 240}],
        json_schema_extra={"x-keys": "a load in percent of the rating, above 0, at most 150"},
    )
    source: str = Field(min_length=1, max_length=200, description="Where the figures come from.")

    @field_validator("runtime_table")
    @classmethod
    def _falls(cls, table: dict[float, float]) -> dict[float, float]:
        return falls_with_load(table)


class Catalogue(Options):
    """A file of models."""

    models: dict[_Name, UpsModel] = Field(description="The models, by name.")


def known_models(site_file: Path | None = None) -> dict[str, UpsModel]:
    """Return all models by name: ours, and those of the site's file over them.

    site_file: None: SITE_FILE where there is one. Raises SettingsError with every mistake of the site's file, and where
    a named file cannot be read.
    """
    packaged = resources.files("powerguard.settings") / "ups-models.yaml"
    models = dict(_checked(load(packaged.read_text(encoding="utf-8"), "ups-models.yaml")))
    if site_file is None and not SITE_FILE.is_file():
        return models
    try:
        document = load_file(SITE_FILE if site_file is None else site_file)
    except StrictYamlError as error:
        raise SettingsError([str(problem) for problem in error.problems]) from None
    return models | _checked(document)


def find_model(models: dict[str, UpsModel], wanted: str) -> tuple[str, UpsModel] | None:
    """Return the model that has this name, however it is spaced and capitalised; None where nobody has."""
    key = _key(wanted)
    for name, model in models.items():
        if key and key in {_key(each) for each in (name, *model.also)}:
            return name, model
    return None


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _checked(document: Document) -> dict[str, UpsModel]:
    files = Files(document.data, (document,), {})
    return validate(Catalogue, files, schema=_schema).models


def _schema() -> dict[str, Any]:
    return Catalogue.model_json_schema()
