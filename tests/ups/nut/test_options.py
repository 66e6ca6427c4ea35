"""Settings of the nut source: what does not go together is a mistake, and reading them loads no network code."""

import subprocess
import sys
from datetime import date
from typing import Any

import pytest
from pydantic import ValidationError

from powerguard.settings.cautions import warnings
from powerguard.settings.schema import Settings
from powerguard.ups.nut.options import NutOptions

SECRET = {"credential": "upsd"}


def given(**more: Any) -> NutOptions:  # noqa: ANN401
    return NutOptions.model_validate({"kind": "nut", "host": "10.0.0.9", "name": "rack-a", **more})


def test_the_defaults() -> None:
    options = given()
    assert (options.port, options.role, options.tls, options.ca) == (3493, "secondary", "if-offered", None)
    assert (options.poll_s, options.timeout_s, options.user) == (0.25, 1.0, None)


@pytest.mark.parametrize(
    "more",
    [
        {"user": "pg", "password": SECRET},
        {"user": "pg", "password": SECRET, "role": "primary", "tls": "required", "ca": "/etc/upsd.pem"},
        {"tls": "off"},
        {"port": 13493, "poll_s": 1.0},
    ],
)
def test_what_fits(more: dict[str, Any]) -> None:
    given(**more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"user": "pg"}, "user and password belong together"),
        ({"password": SECRET}, "user and password belong together"),
        ({"role": "primary"}, "role primary needs user and password"),
        ({"ca": "/etc/upsd.pem", "tls": "off"}, "ca has no effect with tls: off"),
        ({"ca": "upsd.pem"}, "String should match pattern"),
        ({"name": "rack a"}, "String should match pattern"),
        ({"name": "a\nFSD a"}, "String should match pattern"),
        ({"user": "p g", "password": SECRET}, "String should match pattern"),
        ({"tls": True}, "Input should be"),
        ({"poll_s": 0.1}, "greater than or equal to 0.2"),
        ({"password": "secret of the tests"}, "valid dictionary or instance of Secret"),
    ],
)
def test_what_does_not_fit(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        given(**more)
    assert says in str(caught.value)


def cautions(**more: Any) -> list[str]:  # noqa: ANN401
    source = {"kind": "nut", "host": "10.0.0.9", "name": "a", **more}
    settings = Settings.model_validate({"mode": "armed", "ups": {"a": {"sources": [source]}}})
    return [str(one) for one in warnings(settings, today=date(2026, 11, 21)) if "sources" in str(one)]


def test_what_could_be_forged_or_overheard_is_reported() -> None:
    (result,) = cautions()
    assert "ups.a.sources[0].tls: if-offered: upsd's answers can be forged, and its password read" in result
    assert cautions(tls="required") == []
    assert cautions(host="127.0.0.1") == []


def test_reading_the_settings_loads_no_network_code() -> None:
    """A host without NUT pays nothing for it."""
    loaded = "[m for m in sys.modules if m.startswith('powerguard.ups.nut.')]"
    code = f"import sys, powerguard.settings.schema; print({loaded})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['powerguard.ups.nut.options']"
