"""`ups.NAME.output_off`: an order that cuts power goes only where nobody can forge it, by exactly one source."""

import pytest
from pydantic import ValidationError

from powerguard.core.model.actions import PowerOnMethod
from powerguard.daemon.wiring import Ports, build
from powerguard.effectors.base import PowerOnEffector
from powerguard.effectors.ups_output.effector import OutputEffector
from powerguard.settings.schema import Settings

V3 = {"kind": "snmp", "host": "10.0.0.5", "version": 3, "user": "pg"}
KEYS = {"auth": {"file": "/a"}, "priv": {"file": "/p"}}
V2C = {"kind": "snmp", "host": "10.0.0.5"}
NUT = {"kind": "nut", "host": "10.0.0.9", "name": "rack-a"}
LOGIN = {"user": "pg", "password": {"file": "/n"}}
BY_SNMP, BY_NUT = {"by": "snmp"}, {"by": "nut"}
DEDICATED = {"dedicated_network": True}


def made(*sources: dict[str, object], **wanted: object) -> Settings:
    ups = {"rack-a": {"sources": [*sources], **({"output_off": wanted} if wanted else {})}}
    return Settings.model_validate({"mode": "armed", "ups": ups, "bmc": {"kind": "none"}})


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [
        ([V3 | KEYS], BY_SNMP),
        ([V2C], BY_SNMP | DEDICATED),
        ([V2C], BY_SNMP | DEDICATED | {"community": {"file": "/w"}}),
        ([NUT | LOGIN | {"tls": "required"}], BY_NUT),
        ([NUT | LOGIN | {"host": "127.0.0.1"}], BY_NUT),
        ([NUT | LOGIN | {"host": "localhost"}], BY_NUT),
        ([NUT | LOGIN], BY_NUT | DEDICATED),
        ([V2C, V3 | KEYS | {"host": "10.0.0.6"}], BY_SNMP | {"host": "10.0.0.6"}),
        ([V3 | KEYS, NUT], BY_SNMP),
        ([V3 | KEYS], BY_SNMP | {"control": "outlet_off_with_return", "outlet": "1"}),
    ],
)
def test_what_holds(sources: list[dict[str, object]], wanted: dict[str, object]) -> None:
    """And the daemon has who carries it out."""
    parts = build(made(*sources, **wanted), Ports(boot=lambda: "b"), lambda _: None)
    methods = next(each for each in parts.effectors.values() if isinstance(each, PowerOnEffector))
    assert isinstance(methods.of(PowerOnMethod.OUTPUT), OutputEffector)


@pytest.mark.parametrize(
    ("sources", "wanted", "problem"),
    [
        ([V2C], BY_SNMP, "could be forged or overheard on its way: set version: 3 with auth and priv, or dedicated"),
        ([V3], BY_SNMP, "could be forged or overheard"),
        ([V3 | {"auth": {"file": "/a"}}], BY_SNMP, "could be forged or overheard"),
        ([V3 | KEYS], BY_SNMP | {"community": {"file": "/w"}}, "is for versions 1 and 2c"),
        ([NUT | LOGIN], BY_NUT, "set tls: required, or dedicated_network: true"),
        ([NUT], BY_NUT | DEDICATED, "needs user and password in that source"),
        ([V3 | KEYS], BY_NUT, "matches no source of this UPS, or several"),
        ([V3 | KEYS, V3 | KEYS | {"host": "10.0.0.6"}], BY_SNMP, "or several (set output_off.host)"),
        ([V3 | KEYS], BY_SNMP | {"host": "10.0.0.7"}, "snmp at 10.0.0.7 matches no source"),
        ([{"kind": "apcupsd", "host": "h"}], BY_SNMP, "matches no source"),
        ([V3 | KEYS], BY_SNMP | {"control": "outlet_reboot"}, "control outlet_reboot needs outlet"),
        ([V3 | KEYS], BY_SNMP | {"outlet": "1"}, "outlet belongs to"),
        ([NUT | LOGIN], BY_NUT | DEDICATED | {"control": "reboot"}, "control belongs to by: snmp"),
        ([NUT | LOGIN], BY_NUT | DEDICATED | {"community": {"file": "/w"}}, "community belongs to by: snmp"),
        ([V3 | KEYS], BY_SNMP | {"control": "off_stays"}, "Input should be 'off_with_return'"),
    ],
)
def test_what_does_not(sources: list[dict[str, object]], wanted: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made(*sources, **wanted)
    assert problem in str(caught.value)


def test_without_it_nobody_is_there() -> None:
    parts = build(made(V3 | KEYS), Ports(boot=lambda: "b"), lambda _: None)
    methods = next(each for each in parts.effectors.values() if isinstance(each, PowerOnEffector))
    assert methods.of(PowerOnMethod.OUTPUT) is None
