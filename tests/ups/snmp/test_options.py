"""Settings of the snmp source: credentials that do not fit the version are a mistake, not a surprise at night."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from powerguard.ups.snmp.options import SnmpOptions

SECRET = {"credential": "snmp"}


def given(**more: Any) -> SnmpOptions:  # noqa: ANN401
    return SnmpOptions.model_validate({"kind": "snmp", "host": "10.0.0.5", **more})


def test_the_defaults() -> None:
    options = given()
    assert (options.port, options.version, options.poll_s, options.timeout_s, options.profile) == (
        161,
        "2c",
        1,
        1,
        None,
    )


@pytest.mark.parametrize(
    "more",
    [
        {"version": 1, "community": SECRET},
        {"version": "2c"},
        {"version": 3, "user": "pg"},
        {"version": 3, "user": "pg", "auth": SECRET, "auth_protocol": "SHA-256"},
        {"version": 3, "user": "pg", "auth": SECRET, "priv": SECRET, "priv_protocol": "AES-256"},
    ],
)
def test_what_fits(more: dict[str, Any]) -> None:
    assert given(**more).version == more["version"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"version": "3", "user": "pg"}, "version"),
        ({"version": 3}, "version 3 needs a user"),
        ({"version": 3, "user": "ü" * 17}, "user is longer than 32 bytes"),
        ({"version": 3, "user": "pg", "community": SECRET}, "version 3 knows no community"),
        ({"version": 3, "user": "pg", "priv": SECRET}, "priv needs auth as well"),
        ({"user": "pg"}, "belong to version 3, and version is 2c"),
        ({"version": 1, "auth": SECRET}, "belong to version 3, and version is 1"),
        ({"auth_protocol": "SHA-256"}, "belong to version 3, and version is 2c"),
        ({"version": 1, "priv_protocol": "AES-256"}, "belong to version 3, and version is 1"),
        ({"community": "public"}, "community"),
        ({"poll_s": 0.1}, "poll_s"),
        ({"port": 0}, "port"),
        ({"host": ""}, "host"),
    ],
)
def test_what_does_not(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        given(**more)


@pytest.mark.parametrize("module", ["snmp.options", "snmp.traps"])
def test_a_host_without_snmp_does_not_load_it(module: str) -> None:
    """pysnmp takes 14 MB and 0.2 s. Whatever reads the settings or the counts of traps does without."""
    code = f"import sys, powerguard.ups.{module};print([n for n in ('cryptography', 'pysnmp') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
