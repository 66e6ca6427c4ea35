"""`powerguard simulate`: thousands of outages in a world with faults; its modules are imported late."""

import argparse
import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powerguard.cli.render import Bar, Paint, fold, say, table
from powerguard.cli.shared import EX_CONFIG, EX_INTERRUPTED, EX_USAGE, fail, whole

if TYPE_CHECKING:
    from powerguard.sim.world.many import Progress
    from powerguard.sim.world.report import Sample, SimulationOptions
    from powerguard.sim.world.site import Site

EX_VIOLATED: Final = 1
_POLICIES: Final = ("powerguard", "fixed", "nut", "apcupsd", "oracle")
_LEVELS: Final = ("core", "loop")
_OUTAGES: Final = {"core": 1000, "loop": 50}
_RACK_OUTAGES: Final = 100
_JOB_OUTAGES: Final = 100
_MOST_HOSTS: Final = 100
_MOST_SETS: Final = 12
_CAUSES: Final = ("held", "stopped", "boot", "rolled_back")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Play outages in a seeded world in which batteries, gauges, trainers, BMCs and other daemons "
        "report wrong values, hang and die. Exit 0: no invariant was violated; 1: one was, and the command that "
        "plays it again is printed."
    )
    parser.add_argument(
        "--seed",
        type=whole(example=1),
        default=1,
        metavar="N",
        help="seed of the first outage, below 10^15 (default 1)",
    )
    parser.add_argument(
        "--outages",
        type=whole(1, example=1000),
        metavar="N",
        help="how many (default 1000; level loop 50; with several hosts 100)",
    )
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--job", action="store_true", help="several hosts that run one job under Slurm")
    several.add_argument(
        "--hosts",
        metavar="N,N,...",
        type=_hosts,
        help="several hosts on one UPS: how many in each shed tier, the lowest tier first; without faults",
    )
    parser.add_argument("--site", metavar="FILE", help="file with the world's parameters (docs/reference/simulate.md)")
    parser.add_argument(
        "--faults", action=argparse.BooleanOptionalAction, default=True, help="inject faults (default: yes)"
    )
    parser.add_argument(
        "--policy", choices=_POLICIES, default="powerguard", help="the policy that decides (default: powerguard)"
    )
    parser.add_argument(
        "--level",
        choices=_LEVELS,
        default="core",
        help="how much of powerguard is real: the core (default); the loop, bulkhead and journal too, in virtual time",
    )
    parser.add_argument("--jobs", type=whole(1, example=8), metavar="N", help="processes (default: all cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _hosts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > 10 or not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in parts):
        msg = f"must be the hosts of each tier, such as 4,6,6, got {text!r:.40}"
        raise argparse.ArgumentTypeError(msg)
    hosts = tuple(map(int, parts))
    if not 1 <= sum(hosts) <= _MOST_HOSTS:
        msg = f"must be 1 to {_MOST_HOSTS} hosts in all, got {sum(hosts)}"
        raise argparse.ArgumentTypeError(msg)
    return hosts


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.outages is None:
        one_host = _OUTAGES[args.level] if args.hosts is None else _RACK_OUTAGES
        args.outages = _JOB_OUTAGES if args.job else one_host
    whole, played = args.outages, 0
    bar = Bar("outages", format_count="{:.0f}".format)

    def show_progress(count: int) -> None:
        nonlocal played
        played = count
        bar(count, whole)

    try:
        with bar:
            status, result = _simulate(args, show_progress)
    except KeyboardInterrupt:
        print(f"powerguard simulate: interrupted; {played} of {whole} outages were played", file=sys.stderr)
        return EX_INTERRUPTED
    if result is not None:
        if args.json:
            print(json.dumps(result, indent=2))
        else:
            {"simulate": _print, "simulate_rack": _print_rack, "simulate_job": _print_job}[result["object"]](result)
            _print_end(result)
    return status


def _simulate(args: argparse.Namespace, progress: "Progress") -> tuple[int, dict[str, Any] | None]:
    """Play; return the exit status, and the report unless an option is wrong."""
    from powerguard.settings.load import SettingsError
    from powerguard.sim.world.report import SimulationOptions, report
    from powerguard.sim.world.site import Site, load, warnings

    try:
        site = Site() if args.site is None else load(Path(args.site))
    except SettingsError as error:
        if args.json:
            return fail(args, "simulate", "; ".join(error.problems), EX_CONFIG), None
        say(str(error))
        return EX_CONFIG, None
    if args.level != "core" and args.policy != "powerguard":
        why = f"--level {args.level} plays powerguard itself only, not --policy {args.policy}"
        return fail(args, "simulate", why, EX_USAGE), None
    options = SimulationOptions(
        seed=args.seed,
        outages=args.outages,
        policy=args.policy,
        faults=args.faults,
        site=None if args.site is None else shlex.quote(args.site),
        level=args.level,
    )
    several = _several(args, site, options, progress)
    if isinstance(several, str):
        return fail(args, "simulate", several, EX_USAGE), None
    result = report(_play(site, options, args.jobs, progress), options) if several is None else several
    result |= {"warnings": warnings(site)}
    return EX_VIOLATED if result["invariant_violations"] else 0, result


def _several(
    args: argparse.Namespace, site: "Site", options: "SimulationOptions", progress: "Progress"
) -> dict[str, Any] | str | None:
    """Play several hosts; return the report, or which options do not go together; None: it is one host."""
    if args.job:
        from powerguard.sim.cluster.play import play_clusters
        from powerguard.sim.cluster.play import report as of_job

        if args.policy != "powerguard" or args.level != "core":
            return "--job needs --level core and --policy powerguard"
        return of_job(play_clusters(site, options, jobs=args.jobs, progress=progress), options)
    if args.hosts is None and not site.rack.hosts:
        return None
    from powerguard.sim.world import rack
    from powerguard.sim.world.many import play_racks

    if args.policy not in rack.KINDS or args.level != "core":
        return f"several hosts need --level core and --policy {' or '.join(rack.KINDS)}"
    if args.hosts is not None:
        site = rack.with_hosts(site, args.hosts)
    return rack.report(play_racks(site, options, jobs=args.jobs, progress=progress), site, options)


def _play(site: "Site", options: "SimulationOptions", jobs: int | None, progress: "Progress") -> "list[Sample]":
    if options.level == "core":
        from powerguard.sim.world.many import play_many

        return play_many(site, options, jobs=jobs, progress=progress)
    samples: list[Sample] = import_module("powerguard.sim.looped.outage").play_many(
        site, options, jobs=jobs, progress=progress
    )
    return samples


def _print(result: dict[str, Any]) -> None:
    count = result["outages"]

    def share(key: str) -> str:
        return f"{result[key]} ({100.0 * result[key] / count:.2f} %)"

    faults = "with faults" if result["faults"] else "without faults"
    site = "" if result["site"] is None else f", site {result['site']}"
    played = "1 outage" if count == 1 else f"{count} outages"
    mean = f"{result['excess_s_mean']:.1f}"
    dirty, physics = share("planning_dirty"), share("physics_dirty")
    lines = [
        f"{played} from seed {result['seed']}, {faults}, policy {result['policy']}, level {result['level']}{site}",
        "",
        f"  training lost beyond the oracle   {mean} s an outage, p95 {result['excess_s_p95']:.0f} s",
        f"  lost beyond the lower bound       {result['beyond_bound_s_mean']:.1f} s an outage",
        f"  training lost in all              {result['loss_s_mean']:.1f} s an outage",
        f"  of that done again (rollback)     {result['rollback_s_mean']:.1f} s an outage",
        f"  power lost under the host         {dirty} by planning, {physics} by physics",
    ]
    if result["policy"] == "oracle" and result["planning_dirty"]:
        lines.append("                                    (the oracle is the policy that lost the fewest seconds)")
    lines.append(f"  shut down                         {share('shutdowns')}, needlessly {share('needless')}")
    lines.append(f"  stranded                          {share('stranded')}")
    print("\n".join(fold(lines)))


def _print_rack(result: dict[str, Any]) -> None:
    """Show how the hosts of each tier fared."""
    hosts, judged = sum(result["hosts"]), result["hosts_judged"]
    share = 100.0 * result["planning_dirty_hosts"] / max(1, judged)
    played = "1 outage" if result["outages"] == 1 else f"{result['outages']} outages"
    excess = f"{result['excess_s_mean']:.1f} s a host, weighted, p95 {result['excess_s_p95']:.0f} s"
    lines = [
        f"{played} of {hosts} hosts on one UPS, from seed {result['seed']}, policy {result['policy']}, without faults",
        "",
        f"  training lost beyond the oracle   {excess}",
        f"  power lost under a host           {result['planning_dirty_hosts']} of {judged} ({share:.2f} %) by planning",
        "",
    ]
    print("\n".join(fold(lines)))
    head = ("", "hosts", "lost s", "held", "stopped", "boot", "done again")
    rows = [
        (f"  tier {each['tier']}", str(each["hosts"]), *(f"{each[key]:.0f}" for key in ("loss_s_mean", *_CAUSES)))
        for each in reversed(result["tiers"])
    ]
    print("\n".join(table([head, *rows])))


def _print_job(result: dict[str, Any]) -> None:
    """Show what a job on several hosts lost, and what Slurm and persons had to do."""
    faults = "with faults" if result["faults"] else "without faults"
    site = "" if result["site"] is None else f", site {result['site']}"
    played = "1 outage" if result["outages"] == 1 else f"{result['outages']} outages"
    lines = [
        f"{played} of one job on several hosts under Slurm, from seed {result['seed']}, {faults}{site}",
        "",
        f"  training lost by the job          {result['lost_s_mean']:.1f} s an outage",
        f"  of that done again (rollback)     {result['rollback_s_mean']:.1f} s an outage",
        f"  hosts idle for another host       {result['idle_s_mean']:.1f} s an outage, added up",
        f"  powered off                       {result['power_offs']} of {result['hosts']} hosts",
        f"  requeued, submitted again         {result['requeues']}, {result['submitted_again']} times",
        f"  nodes reported to a person        {result['reported']}",
    ]
    print("\n".join(fold(lines)))


def _print_end(result: dict[str, Any]) -> None:
    """Show what every report ends with: what makes it doubtful, and the outages to look at."""
    paint = Paint(sys.stdout)
    for warning in result["warnings"]:
        print("\n" + "\n".join(fold([f"{paint('warning', 'yellow')}: {warning}"])))
    _print_methods(result.get("stranded_by_methods", []))
    for lost in result.get("planning_dirty_outages", [])[:5]:
        print(f"\n{paint('power lost by planning', 'red')}: {lost['reproduce']}")
    for violated in result["invariant_violations"]:
        print(f"\n{paint('violated', 'red')}: {violated['violation']}\n  {violated['reproduce']}")


def _print_methods(sets: list[dict[str, Any]]) -> None:
    """Show which sets of power-on methods left hosts off, the worst first; no output with only the BMC's policy."""
    if all(not each["methods"] and each["policy"] == "always-on" for each in sets):
        return
    worst = sorted(sets, key=lambda each: (-each["stranded"] / each["outages"], -each["outages"]))
    rows = [("power-on methods", "outages", "off", "stranded", "wait", "back by"), *map(_row, worst[:_MOST_SETS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join(fold(["  A late reboot, B output, C sentinel, D watchdog, E clock, P the BMC's policy"])))
    for name, *cells, wakers in rows:
        figures = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=False))
        print("\n".join(fold([f"  {name:<{widths[0]}}  {figures}  {wakers}".rstrip()])))
    if left := worst[_MOST_SETS:]:
        print(f"  and {len(left)} more sets, in which {sum(each['stranded'] for each in left)} stayed off (--json)")


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    from powerguard.sim.world.report import LETTERS

    wakers = [f"{letter} {each['back_by'][method]}" for method, letter in LETTERS.items() if each["back_by"][method]]
    counts = (str(each[key]) for key in ("outages", "went_off", "stranded"))
    return each["set"], *counts, f"{each['wait_s_mean']:.0f} s", ", ".join(wakers)
