"""The input of `plan --size`: the options, else the settings, else defaults; each with its origin."""

import argparse
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from powerguard.cli.plan import amounts
from powerguard.cli.plan.amounts import AmountError
from powerguard.cli.shared import CONFIG
from powerguard.core.energy import budget
from powerguard.core.energy.nameplate import nameplate_table
from powerguard.core.energy.own import own_load
from powerguard.core.model.actions import Conduct
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Battery, State, Trainer
from powerguard.core.size.host import Site
from powerguard.core.size.rack import Group
from powerguard.daemon.observe.terms import OWN_WORDS, PRESUMED
from powerguard.settings.load import load
from powerguard.settings.policy import policy as policy_of
from powerguard.settings.ups_models import Origin, find_model, known_models

BYTES_PER_PARAMETER: Final = 16.0
"""Adam in mixed precision, everything saved: bf16 weights 2, fp32 master 4, two moments 8, and 2 to spare."""
_FIRST_RUN: Final = 2.0
_DEFAULT_CHECKPOINT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The site to check, and the origin of each term.

    title: the UPS in words. size_bytes: what each host writes. promised_s: size over the stated speed of the disk.
    battery_wh: nameplate. None: unknown. sources: origin of a term by its name, in words. not_counted: the other UPSes
    of the settings; one battery is checked.
    """

    site: Site
    title: str
    size_bytes: float | None
    promised_s: float | None
    battery_wh: float | None
    sources: dict[str, str]
    not_counted: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Base:
    """The policy before the options, the trainers and the other UPSes it knows, and where from."""

    policy: Policy
    trainers: tuple[Trainer, ...]
    title: str
    battery_wh: float | None
    origin: str
    others: tuple[str, ...] = ()

    def not_counted(self, args: argparse.Namespace) -> tuple[str, ...]:
        """Return the UPSes of the settings that the answer leaves out; none if the options describe the battery."""
        return self.others if args.ups is args.table is args.battery_wh is None else ()


def read_question(args: argparse.Namespace) -> Question:
    """Put the question together. Raises AmountError for options, SettingsError for invalid settings."""
    base = _base(args)
    sources: dict[str, str] = {}
    policy, title, battery_wh = _battery(args, base, sources)
    policy = _care(args, policy, base, sources)
    load = _load(args, policy, sources)
    load_paused = _load_paused(args, policy, base, load, sources)
    checkpoint_s, size_bytes = _checkpoint(args, base, sources)
    return Question(
        site=Site(policy=policy, load=load, load_paused=load_paused, checkpoint_s=checkpoint_s),
        title=title,
        size_bytes=size_bytes,
        promised_s=None if args.disk is None else checkpoint_s / _FIRST_RUN,
        battery_wh=battery_wh,
        sources=sources,
        not_counted=base.not_counted(args),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsQuestion:
    """The hosts of a shared UPS to check, what holds for all of them, and the origin of each term.

    not_counted: as in `Question`.
    """

    policy: Policy
    groups: tuple[Group, ...]
    title: str
    sources: dict[str, str]
    not_counted: tuple[str, ...] = ()


_OF_ONE_HOST: Final = (
    "params",
    "bytes_per_param",
    "hosts",
    "bytes",
    "disk",
    "checkpoint_s",
    "load_w",
    "load_pct",
    "paused_w",
    "paused_pct",
)
_KEYS: Final = ("tier", "w", "paused", "checkpoint", "stop", "n")
_MOST_GROUPS: Final = 32


def read_hosts_question(args: argparse.Namespace) -> HostsQuestion:
    """Put the question for several hosts together. Raises as `read_question` does."""
    for name in _OF_ONE_HOST:
        if getattr(args, name) is not None:
            msg = f"--{name.replace('_', '-')} and --host contradict each other; write it in --host"
            raise AmountError(msg)
    if len(args.host) > _MOST_GROUPS:
        msg = f"--host: {len(args.host)} are more than {_MOST_GROUPS}; put hosts that are alike together (n=6)"
        raise AmountError(msg)
    base = _base(args)
    sources: dict[str, str] = {}
    policy, title, _ = _battery(args, base, sources)
    policy = _care(args, policy, base, sources)
    if policy.rating_w is None:
        msg = "--host needs --rating-w (the rated watts of the UPS)"
        raise AmountError(msg)
    groups = tuple(_group(text, policy, policy.rating_w) for text in args.host)
    return HostsQuestion(policy=policy, groups=groups, title=title, sources=sources, not_counted=base.not_counted(args))


def _group(text: str, policy: Policy, rating_w: float) -> Group:
    """Read one --host: tier=2,w=3000,checkpoint=20s,n=6."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in _KEYS:
            msg = f"--host: {part[:40]!r} is not one of {', '.join(f'{key}=' for key in _KEYS)}"
            raise AmountError(msg)
        if key in fields:
            msg = f"--host: {key} occurs twice"
            raise AmountError(msg)
        fields[key] = value
    missing = [key for key in ("tier", "w") if key not in fields]
    if missing:
        msg = f"--host: {text[:60]!r} has no {missing[0]} (example: tier=2,w=3000,checkpoint=20s,n=6)"
        raise AmountError(msg)
    watts = amounts.watts("--host w", fields["w"])
    paused_w = watts * policy.paused_load_share
    if "paused" in fields:
        paused_w = amounts.watts("--host paused", fields["paused"])
    if paused_w > watts:
        msg = f"--host: paused={paused_w:g} is more than w={watts:g}: check whether they are swapped"
        raise AmountError(msg)
    checkpoint_s = _DEFAULT_CHECKPOINT_S
    if "checkpoint" in fields:
        checkpoint_s = amounts.seconds("--host checkpoint", fields["checkpoint"], 0.1, 86400.0)
    return Group(
        tier=int(amounts.whole("--host tier", fields["tier"], 0, 9)),
        count=int(amounts.whole("--host n", fields.get("n", "1"), 1, 1000)),
        load=watts / rating_w,
        load_paused=paused_w / rating_w,
        checkpoint_s=checkpoint_s,
        stop_s=amounts.seconds("--host stop", fields["stop"], 1.0, 3600.0) if "stop" in fields else None,
    )


def alone(result: dict[str, Any]) -> str:
    """Return the sentence that says which UPSes of the settings are not counted; "" if all are."""
    if not result["not_counted"]:
        return ""
    others = " and ".join(result["not_counted"])
    each = "check each UPS by itself (--ups, --table or --battery-wh, with --rating-w)"
    return f"This is {result['ups']} alone, without {others} of the settings; {each}."


def _base(args: argparse.Namespace) -> _Base:
    path = Path(args.config)
    is_default = str(path) == CONFIG and "POWERGUARD_CONFIG" not in os.environ
    if args.no_settings or (is_default and not path.exists()):
        defaults = Policy(boot_id="size", ups="ups")
        return _Base(policy=defaults, trainers=(), title="UPS", battery_wh=None, origin="default")
    settings = load(path)
    made = policy_of(settings, boot_id="size", today=datetime.now(UTC).date())
    trainers = tuple(
        Trainer(name=each.name, conduct=each.conduct, checkpoint_s=each.checkpoint_s, disk=each.disk)
        for each in made.trainers
    )
    ups = settings.ups[settings.feed]
    others = tuple(name for name in settings.feeding if name != settings.feed)
    return _Base(
        policy=made,
        trainers=trainers,
        title=settings.feed,
        battery_wh=ups.battery_wh,
        origin="settings",
        others=others,
    )


def _one_of(args: argparse.Namespace, *options: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None]
    if len(given) > 1:
        msg = f"{' and '.join(given)} contradict each other; keep one"
        raise AmountError(msg)


def _battery(args: argparse.Namespace, base: _Base, sources: dict[str, str]) -> tuple[Policy, str, float | None]:
    """Return the policy with its table and rating, the UPS in words, and the nameplate energy."""
    _one_of(args, "ups", "table", "battery_wh")
    if args.models is not None and args.ups is None:
        msg = f"--models {args.models[:64]} needs --ups NAME: name the model"
        raise AmountError(msg)
    policy, title, battery_wh = base.policy, base.title, base.battery_wh
    rating_w = None if args.rating_w is None else amounts.watts("--rating-w", args.rating_w)
    if args.ups is not None:
        models = known_models(None if args.models is None else Path(args.models))
        try:
            title, model = find_model(models, args.ups)
        except LookupError as error:
            msg = f"--ups: {error.args[0]} (or give --table)"
            raise AmountError(msg) from None
        points = tuple((load_pct / 100.0, tau_s) for load_pct, tau_s in model.table.items())
        rating_w, battery_wh = rating_w or model.rating_w, None
        policy = replace(policy, runtime_table=points, table_origin="settings")
        sources["tau"] = f"{title}: {model.source}"
        if model.origin is Origin.GAUGE:
            title = f"{title} (as one such UPS reported, not the maker's figures)"
    elif args.table is not None:
        policy = replace(policy, runtime_table=amounts.table("--table", args.table), table_origin="settings")
        title, battery_wh, sources["tau"] = "UPS", None, "--table"
    elif args.battery_wh is not None:
        battery_wh = amounts.watt_hours("--battery-wh", args.battery_wh)
        rating_w = rating_w or policy.rating_w
        if rating_w is None:
            msg = "--battery-wh needs --rating-w (the rated watts of the UPS)"
            raise AmountError(msg)
        policy = replace(policy, runtime_table=nameplate_table(battery_wh, rating_w), table_origin="nameplate")
        title = f"UPS of {rating_w:g} W with {battery_wh:g} Wh"
        sources["tau"] = "made from the nameplate, cautiously: --battery-wh and the rating"
    elif policy.runtime_table:
        nameplate = policy.table_origin == "nameplate"
        sources["tau"] = "made from battery_wh of the settings, cautiously" if nameplate else "runtime_table, settings"
        if nameplate and rating_w is not None and battery_wh is not None:
            policy = replace(policy, runtime_table=nameplate_table(battery_wh, rating_w))
    else:
        where = "the settings have no runtime_table" if base.origin == "settings" else "there are no settings"
        msg = (
            f"the battery is unknown, {where}: give --ups MODEL (known: {', '.join(sorted(known_models()))}), --table "
            "50:540,75:360,100:240 of the data sheet, or --battery-wh and --rating-w"
        )
        raise AmountError(msg)
    return replace(policy, rating_w=rating_w or policy.rating_w), title, battery_wh


def _care(args: argparse.Namespace, policy: Policy, base: _Base, sources: dict[str, str]) -> Policy:
    """Return the policy with health, margin, reserve and stop of the options."""
    sources["health"] = PRESUMED[policy.health_from]
    sources["margin"] = sources["reserve_s"] = sources["stop"] = base.origin
    if args.health is not None:
        policy = replace(policy, health=amounts.share("--health", args.health, 0.2, 1.0))
        sources["health"] = "--health"
    if args.margin is not None:
        policy = replace(policy, margin=amounts.share("--margin", args.margin, 0.0, 0.9))
        sources["margin"] = "--margin"
    if args.reserve_s is not None:
        policy = replace(policy, reserve_s=amounts.seconds("--reserve-s", args.reserve_s, 0.0, 1800.0))
        sources["reserve_s"] = "--reserve-s"
    if args.stop_s is not None:
        stop_s = amounts.seconds("--stop-s", args.stop_s, 1.0, 3600.0)
        policy = replace(
            policy,
            stop_q95_s=stop_s,
            force_after_s=max(stop_s, policy.force_after_s),
            stop_median_s=min(stop_s, policy.stop_median_s),
        )
        sources["stop"] = "--stop-s"
    return policy


def _power(args: argparse.Namespace, policy: Policy, name: str, least: float, sources: dict[str, str]) -> float | None:
    """Return a load in watts or percent of the rating as a share; None if it was not given."""
    in_watts, in_percent = getattr(args, f"{name}_w"), getattr(args, f"{name}_pct")
    _one_of(args, f"{name}_w", f"{name}_pct")
    if in_percent is not None:
        sources[name] = f"--{name}-pct"
        return amounts.percent(f"--{name}-pct", in_percent, least, 1000.0) / 100.0
    if in_watts is None:
        return None
    value = amounts.watts(f"--{name}-w", in_watts)
    if policy.rating_w is None:
        msg = f"--{name}-w needs --rating-w (the rated watts of the UPS); or give --{name}-pct"
        raise AmountError(msg)
    sources[name] = f"--{name}-w {value:g} W of {policy.rating_w:g} W"
    return value / policy.rating_w


def _load(args: argparse.Namespace, policy: Policy, sources: dict[str, str]) -> float:
    load = _power(args, policy, "load", 1.0, sources)
    if load is not None:
        return load
    sources["load"] = "not given: counted as full (--load-w, --load-pct)"
    return 1.0


def _load_paused(args: argparse.Namespace, policy: Policy, base: _Base, load: float, sources: dict[str, str]) -> float:
    given = _power(args, policy, "paused", 0.5, sources)
    if given is not None:
        if given > load * (1 + 1e-9):
            msg = (
                f"the paused load ({100 * given:g} %) is more than the load ({100 * load:g} %): check whether "
                "they are swapped"
            )
            raise AmountError(msg)
        return min(given, load)
    trainers = base.trainers or (Trainer(name="training", conduct=Conduct.PAUSE),)
    host_load = own_load(replace(policy, feeds=()), State(battery=Battery(load=load)), 0.0)
    paused = budget.paused_load(policy, trainers, load, own=host_load)
    if host_load is not None and any(each.conduct is not Conduct.CONTINUE for each in trainers):
        falls = f"{1.0 - policy.paused_load_share:.3g} x load of this host ({OWN_WORDS[host_load.source]})"
        sources["paused"] = f"load - {falls}; the other hosts as now"
    elif paused == load:
        sources["paused"] = "the load: no trainer of the settings pauses"
    else:
        origin = base.origin if policy.paused_is_set else "default"
        sources["paused"] = f"load x {policy.paused_load_share:g} ({origin}; a drill measures it)"
    return paused


def _checkpoint(args: argparse.Namespace, base: _Base, sources: dict[str, str]) -> tuple[float, float | None]:
    """Return the seconds from order to durable, and the bytes that this host writes."""
    _one_of(args, "params", "bytes")
    size = None if args.bytes is None else amounts.size_bytes("--bytes", args.bytes)
    hosts = amounts.whole("--hosts", args.hosts, 1, 1e6) if args.hosts is not None else 1.0
    written = "" if size is None else "--bytes"
    if args.params is not None:
        each = BYTES_PER_PARAMETER
        if args.bytes_per_param is not None:
            each = amounts.number("--bytes-per-param", args.bytes_per_param, 0.5, 64)
        size = amounts.parameters("--params", args.params) * each
        written = f"--params {args.params} x {each:g} bytes" + (
            " (Adam, mixed precision, all states)" if args.bytes_per_param is None else ""
        )
    elif args.bytes_per_param is not None:
        msg = "--bytes-per-param needs --params"
        raise AmountError(msg)
    if size is None and hosts != 1.0:
        msg = "--hosts needs --params or --bytes: it is the number of hosts that write them"
        raise AmountError(msg)
    if size is not None:
        size /= hosts
        sources["size_bytes"] = written + (f" / {hosts:g} hosts" if hosts != 1.0 else "")
    if args.checkpoint_s is not None:
        if args.disk is not None:
            msg = "--checkpoint-s and --disk contradict each other; keep one"
            raise AmountError(msg)
        sources["checkpoint_s"] = "--checkpoint-s"
        return amounts.seconds("--checkpoint-s", args.checkpoint_s, 0.1, 86400.0), size
    if args.disk is not None:
        if size is None:
            msg = "--disk needs --params or --bytes"
            raise AmountError(msg)
        took_s = _FIRST_RUN * size / amounts.rate_bytes("--disk", args.disk)
        sources["checkpoint_s"] = f"size / --disk {args.disk} x {_FIRST_RUN:g} (not measured yet)"
        return amounts._within("checkpoint", took_s, 0.0, 1e7, "s"), size  # noqa: SLF001
    if size is not None:
        msg = f"{written.split()[0]} needs --disk (example: 0.4GB/s), or --checkpoint-s as measured"
        raise AmountError(msg)
    if base.trainers:
        sources["checkpoint_s"] = "trainers of the settings (summed over a shared disk)"
        return budget.checkpoint_s(base.trainers, 0.0), None
    sources["checkpoint_s"] = "default, not given (--checkpoint-s, or --bytes and --disk)"
    return _DEFAULT_CHECKPOINT_S, None
