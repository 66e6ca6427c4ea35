"""What the core gets of the settings: shares, seconds, ages resolved, nothing optimistic."""

from datetime import date

import pytest
from pydantic import ValidationError

from powerguard.core.model.actions import Conduct
from powerguard.core.model.policy import Policy, Shared, Shed, TrainerPolicy
from powerguard.settings.cautions import KINDS, warnings
from powerguard.settings.policy import battery_age_months, policy
from powerguard.settings.schema import Settings
from tests.golden import Golden

TODAY = date(2026, 11, 21)
BASE: dict[str, object] = {"mode": "dry-run", "ups": {"a": {"sources": [{"kind": "snmp", "host": "h"}]}}}


def made(**more: object) -> Settings:
    return Settings.model_validate({**BASE, **more})


def with_ups(**more: object) -> Settings:
    return made(ups={"a": {"sources": [{"kind": "snmp", "host": "h"}], **more}})


def policy_of(settings: Settings) -> Policy:
    return policy(settings, boot_id="b", today=TODAY)


def test_the_defaults_of_the_settings_are_those_of_the_core() -> None:
    assert policy_of(made(mode="armed", bmc={"kind": "auto"})) == Policy(boot_id="b", ups="a")
    assert not policy_of(made()).bmc


@pytest.mark.parametrize(
    ("mode", "powers_off"),
    [("armed", True), ("rehearse", False), ("dry-run", False)],
)
def test_the_core_knows_whether_the_order_kills(mode: str, powers_off: bool) -> None:
    assert policy_of(made(mode=mode)).powers_off is powers_off


def test_the_runtime_table_is_sorted_and_in_shares() -> None:
    table = policy_of(with_ups(runtime_table={100: 240, 12.5: 3000, 50: 540})).runtime_table
    assert table == ((0.125, 3000.0), (0.5, 540.0), (1.0, 240.0))


@pytest.mark.parametrize(
    ("installed", "months", "health"),
    [(None, None, 0.75), ("2026-11", 0, 0.75), ("2023-11", 36, 0.75), ("2023-10", 37, 0.6), ("2027-01", -2, 0.75)],
)
def test_an_old_battery_counts_for_less(installed: str | None, months: int | None, health: float) -> None:
    assert battery_age_months(installed, TODAY) == months
    assert policy_of(with_ups(battery_installed=installed)).health == health


@pytest.mark.parametrize(("health_set", "health", "replaced"), [(0.9, 0.9, 0.6), (0.4, 0.4, 0.4)])
def test_a_measured_health_is_taken_as_it_is(health_set: float, health: float, replaced: float) -> None:
    """Even a battery that asks to be replaced is never taken for better than measured."""
    got = policy_of(made(budget={"health": health_set}))
    assert (got.health, got.health_replace) == (health, replaced)


@pytest.mark.parametrize(
    ("q95", "median", "force_after", "expected"),
    [
        (None, None, 110, (110, 45)),
        (80, None, 110, (80, 45)),
        (300, None, 110, (110, 45)),
        (30, None, 110, (30, 30)),
        (None, None, 20, (20, 20)),
        (None, 60, 40, (40, 40)),
    ],
)
def test_a_stop_never_counts_for_more_than_its_end_by_force(
    q95: float | None, median: float | None, force_after: float, expected: tuple[float, float]
) -> None:
    got = policy_of(made(budget={"stop_q95_s": q95, "stop_median_s": median}, host={"force_after_s": force_after}))
    assert (got.stop_q95_s, got.stop_median_s) == expected


def test_trainers_come_with_their_seed_and_their_limit() -> None:
    trainers = [
        {"name": "a", "url": "unix:/a", "size_bytes": 8_500_000_000, "write_bytes_per_s": 425_000_000, "disk": "nvme"},
        {"name": "b", "url": "unix:/b", "after": "continue", "checkpoint_s": 7, "max_checkpoint_s": 90},
        {"kind": "command", "name": "c", "after": "exit", "command": ["/bin/save"], "checkpoint_dir": "/ck"},
    ]
    assert policy_of(made(trainers=trainers)).trainers == (
        TrainerPolicy(name="a", conduct=Conduct.PAUSE, checkpoint_s=40.0, max_checkpoint_s=600.0, disk="nvme"),
        TrainerPolicy(name="b", conduct=Conduct.CONTINUE, checkpoint_s=7.0, max_checkpoint_s=90.0),
        TrainerPolicy(name="c", conduct=Conduct.EXIT, unseen=True),
    )


def test_percent_and_hours_become_shares_and_seconds() -> None:
    got = policy_of(made(budget={"recharge_h": 2.5, "resume_charge_pct": 55, "paused_load": 0.3}))
    assert (got.recharge_s, got.resume_charge_share, got.paused_load_share) == (9000, 0.55, 0.3)


def test_the_ups_brings_its_delays_and_its_pace() -> None:
    source = {"kind": "snmp", "host": "h", "poll_s": 4.0}
    got = policy_of(
        made(ups={"a": {"sources": [source], "output_off_after_s": 30, "forced_shutdown_delay_s": 40, "rating_w": 900}})
    )
    assert (got.ups_off_s, got.fsd_delay_s, got.stale_s, got.rating_w) == (30, 40, 12, 900)


def warnings_of(settings: Settings) -> dict[str, str]:
    return {".".join(map(str, warning.path)): warning.what for warning in warnings(settings, today=TODAY)}


def test_what_is_wanting_in_the_least_settings_is_reported(golden: Golden) -> None:
    found = warnings_of(made())
    assert set(found) == {"ups.a.sources.0.version", "ups.a.runtime_table", "bmc.kind"}
    golden("policy", "\n".join(f"{where}: {text}" for where, text in found.items()))


def test_settings_that_lack_nothing_warn_of_nothing() -> None:
    source = {"kind": "snmp", "host": "h", "version": 3, "user": "u", "auth": {"credential": "c"}}
    bmc = {"kind": "ipmi-lan", "host": "b", "user": "u", "password": {"credential": "c"}}
    assert warnings_of(made(ups={"a": {"sources": [source], "runtime_table": {50: 500}}}, bmc=bmc)) == {}


def test_a_socket_that_only_its_user_can_make_needs_no_uids() -> None:
    """What a stranger could put a socket in the place of is told; the rest is not."""
    for trainer in (
        {"name": "t", "url": "unix:/run/powerguard-trainers/t.sock", "uids": [1000]},
        {"name": "t", "url": "unix:/run/llm/t.sock"},
        {"name": "t", "url": "http://127.0.0.1:5000"},
    ):
        assert set(warnings_of(made(trainers=[trainer]))) == set(warnings_of(made()))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"http": {"listen": "0.0.0.0"}}, "http.listen"),
        ({"trainer_uids": ["root", "no-such-user"]}, "trainer_uids.1"),
        ({"trainers": [{"name": "t", "url": "unix:/x/t.sock", "uids": ["no-such-user"]}]}, "trainers.0.uids.0"),
        ({"budget": {"margin": 0.05}}, "budget.margin"),
        ({"budget": {"reserve_s": 5}}, "budget.reserve_s"),
        ({"budget": {"recharge_h": 0.5}}, "budget.recharge_h"),
        ({"trainer_sockets": None}, "trainers"),
        ({"trainers": [{"name": "t", "url": "unix:/run/powerguard-trainers/t.sock"}]}, "trainers.0.uids"),
        ({"ups": {"a": {"sources": [{"kind": "snmp", "host": "h", "poll_s": 5.0}]}}}, "ups.a.sources.0.poll_s"),
        (
            {"ups": {"a": {"sources": [{"kind": "snmp", "host": "h", "version": 3, "user": "u"}]}}},
            "ups.a.sources.0.auth",
        ),
        (
            {
                "bmc": {
                    "kind": "ipmi-lan",
                    "host": "b",
                    "user": "u",
                    "password": {"credential": "c"},
                    "policy": "observe",
                }
            },
            "bmc.policy",
        ),
        ({"bmc": {"kind": "in-band", "ca": "/etc/ca.pem"}}, "bmc.ca"),
        ({"bmc": {"kind": "in-band", "system": "1"}}, "bmc.system"),
        ({"gpu": {"cap_share": 0.5}}, "gpu.cap_share"),
        ({"rtc": {"kind": "none", "device": "/dev/rtc1"}}, "rtc.device"),
        ({"scheduler": {"hold": True}}, "scheduler.hold"),
        ({"sentinel": {"name": "node-1"}}, "sentinel.name"),
        ({"resume": {"by": "scheduler", "command": ["/bin/true"]}}, "resume.command"),
        ({"resume": {"by": "scheduler", "target": "train.service"}}, "resume.target"),
        ({"bmc": {"kind": "none"}, "resume": {"after_unseen_stop": "if-confirmed"}}, "resume.after_unseen_stop"),
        ({"resume": {"command": ["/bin/true"], "target": "train.service"}}, "resume.target"),
        ({"scheduler": {"kind": "slurm"}, "resume": {"command": ["/bin/true"]}}, "resume.by"),
    ],
)
def test_what_reduces_the_protection_is_reported(more: dict[str, object], key: str) -> None:
    assert set(warnings_of(made(**more))) - set(warnings_of(made())) == {key}


@pytest.mark.parametrize("by", ["host", "scheduler"])
def test_who_starts_training_beside_slurm_is_a_choice(by: str) -> None:
    assert warnings_of(made(scheduler={"kind": "slurm"}, resume={"by": by})) == warnings_of(made())


def test_a_block_without_its_kind_is_reported_and_the_kind_is_one(golden: Golden) -> None:
    """Where only the kind was forgotten: every setting of the block, and a kind that its schema has."""
    found = warnings_of(
        made(gpu={"cap_share": 0.5}, scheduler={"node": "a", "hold": True}, rtc={"device": "/dev/rtc1"})
    )
    golden("policy", "\n".join(f"{where}: {text}" for where, text in found.items() if "no effect" in text))
    needs = {"sentinel": {"urls": ["https://a:1"], "key": {"credential": "c"}}}
    for block, kind in KINDS.items():
        assert not [
            where for where in warnings_of(made(**{block: {"kind": kind, **needs.get(block, {})}})) if block in where
        ]


@pytest.mark.parametrize(("installed", "word"), [("2020-01", "older than 3 years"), ("2027-01", "lies in the future")])
def test_the_age_of_the_battery_is_reported(installed: str, word: str) -> None:
    assert word in warnings_of(with_ups(battery_installed=installed))["ups.a.battery_installed"]


def test_a_ups_that_feeds_nobody_is_reported(golden: Golden) -> None:
    both = {name: {"sources": [{"kind": "snmp", "host": "h"}]} for name in ("a", "b")}
    found = warnings_of(made(ups=both, feeds={"supplies": ["b"]}))
    golden("policy", found["ups.a"])


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, "default"), ({"health": 0.75}, "settings"), ({"health": 0.6}, "settings")]
)
def test_who_says_so_is_reported(options: dict[str, float], wanted: str) -> None:
    """A number that happens to be the default's is still the operator's."""
    assert policy_of(made(budget=options)).health_from == wanted
    assert policy_of(with_ups(battery_installed="2020-01")).health_from == "battery_old"


@pytest.mark.parametrize(
    ("options", "is_set"), [({}, False), ({"stop_q95_s": 40}, True), ({"stop_median_s": 20}, True)]
)
def test_a_stop_that_is_set_is_not_learned(options: dict[str, float], is_set: bool) -> None:
    assert policy_of(made(budget=options)).stop_is_set is is_set


def test_a_shared_ups_and_the_tier_reach_the_core() -> None:
    """As they stand; of several feeds, what is true of the whole host."""
    result = policy_of(with_ups(rating_w=5000, shared={"hosts": 3, "own_w": 900, "longest_stop_s": 90}))
    assert result.shared == Shared(hosts=3, own_w=900.0, longest_stop_s=90.0)
    assert policy_of(made(shed={"tier": 1, "extra_reserve_s": 40})).shed == Shed(tier=1, highest=2, extra_s=40.0)
    one = {"sources": [{"kind": "snmp", "host": "h"}], "rating_w": 5000, "shared": {"hosts": 2, "own_w": 900}}
    two = {"sources": [{"kind": "snmp", "host": "i"}], "shared": {"hosts": 4}}
    both = made(ups={"a": one, "b": two}, feeds={"supplies": ["a", "b"]})
    assert policy_of(both).shared == Shared(hosts=4, own_w=900.0)


@pytest.mark.parametrize(
    ("ups", "more", "said"),
    [
        (
            {"shared": {"hosts": 2, "outlets": [{"kind": "nut", "host": "h", "name": "pdu", "outlets": [3, 3]}]}},
            {},
            "an outlet is named twice",
        ),
        ({"shared": {}}, {}, "shared needs hosts, own_w or both"),
        ({"shared": {"own_w": 900}}, {}, "shared.own_w says nothing without rating_w"),
        ({"shared": {"hosts": 0}}, {}, "greater than or equal to 1"),
        ({}, {"shed": {"tier": 3}}, "tier 3 is above highest, 2"),
    ],
)
def test_what_a_shared_ups_must_say(ups: dict[str, object], more: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        made(ups={"a": {"sources": [{"kind": "snmp", "host": "h"}], **ups}}, **more)
