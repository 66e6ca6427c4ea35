"""The codec: every byte that a BMC may answer, and every settings mistake, has one meaning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from powerguard.effectors.bmc.ipmi import (
    GET_CHASSIS_STATUS,
    GET_POLICY_SUPPORT,
    GET_RESTART_CAUSE,
    ChassisStatus,
    Failure,
    PowerRestorePolicy,
    ReplyError,
    RestartCause,
    completion,
    decode_restart_cause,
    decode_support,
    set_policy,
)
from powerguard.effectors.options import BmcOptions
from powerguard.options import Secret

BUSY = {0xC0, 0xC3, 0xC4, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3}
UNSUPPORTED = {0xC1, 0xC2, 0xC9, 0xCB, 0xCC, 0xCD, 0xD5, 0xD6}


def test_commands_are_the_bytes_of_chapter_28() -> None:
    """Network function, command and data as the specification writes them; nothing of ours needs an administrator."""
    commands = [GET_CHASSIS_STATUS, GET_RESTART_CAUSE, GET_POLICY_SUPPORT]
    assert [(c.netfn, c.number, c.data) for c in commands] == [(0, 1, b""), (0, 7, b""), (0, 6, b"\x03")]
    sets = {
        policy: set_policy(policy).data for policy in PowerRestorePolicy if policy is not PowerRestorePolicy.UNKNOWN
    }
    assert sets == {"always-on": b"\x02", "last-state": b"\x01", "always-off": b"\x00"}
    with pytest.raises(ValueError, match="unknown is not"):
        set_policy(PowerRestorePolicy.UNKNOWN)


@pytest.mark.parametrize(
    ("first", "policy"), [(0x01, "always-off"), (0x21, "last-state"), (0x41, "always-on"), (0x61, "unknown")]
)
def test_status_shows_the_policy(first: int, policy: str) -> None:
    """Bits 6:5 of the first byte (section 28.2); these bytes were read from ipmi_sim by four clients."""
    status = ChassisStatus.decode(bytes([first, 0x00, 0x00]))
    assert (status.policy, status.power_on, status.ac_failed) == (policy, True, False)


def test_status_shows_the_last_loss_of_ac() -> None:
    """From the second byte."""
    status = ChassisStatus.decode(b"\x5e\x01\x00\x00")
    assert not status.power_on
    assert status.ac_failed is True
    assert status.raw == b"\x5e\x01\x00\x00"


def test_short_and_long_answers_are_read_and_empty_ones_refused() -> None:
    """Boards cut and stretch answers: what is there counts, what is not there is None, and nothing is nothing."""
    assert ChassisStatus.decode(b"\x41").ac_failed is None
    assert ChassisStatus.decode(b"\x41\x00\x00\x00\xff\xff").policy == "always-on"
    with pytest.raises(ReplyError, match="without data"):
        ChassisStatus.decode(b"")


@given(st.binary(min_size=1, max_size=40))
def test_any_answer_decodes(data: bytes) -> None:
    """A hostile BMC cannot make the codec raise."""
    assert ChassisStatus.decode(data).policy in PowerRestorePolicy
    assert decode_restart_cause(data) in RestartCause
    assert decode_support(data) is not None


def test_support_is_a_mask() -> None:
    """Bit 0 off, bit 1 last state, bit 2 on (section 28.8); reserved bits mean nothing."""
    assert decode_support(b"") is None
    assert decode_support(b"\x00") == frozenset()
    off, last, on = PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE, PowerRestorePolicy.ALWAYS_ON
    assert decode_support(b"\x03") == frozenset({off, last})
    assert decode_support(b"\xff\x00") == frozenset({off, last, on})


def test_restart_cause_names_the_layer_that_brought_the_host_back() -> None:
    """Section 28.11: 4 watchdog, 6 always-on policy, 7 last state, Bh clock; the rest of the byte is reserved."""
    decoded = {code: decode_restart_cause(bytes([code, 0x01])) for code in (0x00, 0x04, 0x06, 0x07, 0x0B, 0xF6, 0x0C)}
    assert decoded == {
        0x00: "unknown",
        0x04: "watchdog",
        0x06: "policy-always-on",
        0x07: "policy-last-state",
        0x0B: "rtc-wake",
        0xF6: "policy-always-on",
        0x0C: "unknown",
    }
    assert decode_restart_cause(b"") is RestartCause.UNKNOWN


def test_every_completion_code_has_a_kind_and_a_sentence() -> None:
    """Table 5-2, all 256: busy is worth another try, unsupported and privilege never, the rest is a broken BMC."""
    assert completion(0x00) is None
    kinds: dict[int, Failure] = {}
    for code in range(1, 256):
        result = completion(code)
        assert result is not None
        kinds[code], meaning = result
        assert len(meaning) > 8
    assert {code for code, kind in kinds.items() if kind is Failure.BUSY} == BUSY
    assert {code for code, kind in kinds.items() if kind is Failure.UNSUPPORTED} == UNSUPPORTED
    assert {code for code, kind in kinds.items() if kind is Failure.PRIVILEGE} == {0xD4}
    rest = {kind for code, kind in kinds.items() if code not in BUSY | UNSUPPORTED | {0xD4}}
    assert rest == {Failure.PROTOCOL}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "kind"),
        ({"kind": "ipmi"}, "'none', 'auto', 'in-band', 'redfish' or 'ipmi-lan'"),
        ({"kind": "redfish"}, "kind redfish needs host, user, password"),
        ({"kind": "in-band", "host": "10.0.8.21"}, "kind in-band does not use host"),
        ({"kind": "none", "ca": "/a", "fingerprint": "9f" * 32}, "not both"),
        ({"kind": "none", "fingerprint": "9f" * 31}, "pattern"),
        ({"kind": "ipmi-lan"}, "kind ipmi-lan needs host, user, password"),
        ({"kind": "none", "host": "10.0.8.21"}, "kind none does not use host"),
        ({"kind": "none", "port": 0}, "greater than or equal to 1"),
        (
            {"kind": "ipmi-lan", "host": "b", "user": "seventeen-letters", "password": Secret(credential="c")},
            "at most 16",
        ),
        ({"kind": "ipmi-lan", "host": "-o ProxyCommand", "user": "u"}, "pattern"),
        ({"kind": "auto", "host": "10.0.8.21:443"}, "a port goes into port or https_port"),
        ({"kind": "auto", "host": "10.0.8..21"}, "must be an address or a name"),
        ({"kind": "auto", "host": "bmc%eno1"}, "must be an address or a name"),
        ({"kind": "none", "policy": "brackets"}, "'ensure', 'bracket' or 'observe'"),
        ({"kind": "auto", "host": "10.0.8.21"}, "kind auto needs user, password"),
    ],
)
def test_settings_mistakes_are_named(given: dict[str, object], expected: str) -> None:
    """What is wrong and what would be right, before anything is sent to a BMC."""
    with pytest.raises(ValidationError, match=expected):
        BmcOptions.model_validate(given)


def test_settings_take_names_and_addresses() -> None:
    """IPv4, IPv6 with a zone, and names are hosts."""
    for host in ("10.0.8.21", "fe80::1%eno1", "2001:db8::7", "bmc-7.rack.example", "bmc_7."):
        options = BmcOptions(kind="ipmi-lan", host=host, user="u", password=Secret(credential="bmc"))
        assert (options.host, options.port, options.policy) == (host, 623, "ensure")
