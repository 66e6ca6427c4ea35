"""Writes docs/reference/simulate.md: python -m powerguard.sim.world.reference > docs/reference/simulate.md."""

from typing import Any, Final

from pydantic import BaseModel

from powerguard.sim.world.site import Site

_KEYS: Final = (
    ("policy, level, seed, faults, site, outages", "what was asked for"),
    (
        "excess_s_mean, excess_s_p95",
        "seconds of training lost beyond the oracle (who minimises them alone), per outage",
    ),
    ("beyond_bound_s_mean", "the same beyond what nobody can beat"),
    ("loss_s_mean", "seconds of training lost in all, per outage"),
    ("rollback_s_mean", "of these, work that had to be done again"),
    ("planning_dirty, physics_dirty", "outages in which power was lost under the host, and why"),
    (
        "shutdowns, needless, stranded",
        "outages with a power-off, with a needless one, with a host that did not come back",
    ),
    ("stranded_by_ways", "for each set of ways back that there was: who came back by what, and who did not (below)"),
    ("planning_dirty_outages", "the first hundred of those: {seed, reproduce}"),
    ("invariant_violations", "every one: {seed, violation, reproduce}"),
    ("warnings", "what in the site file makes the comparison doubtful, in words"),
)
_HEAD: Final = """# powerguard simulate

Made from the code: `python -m powerguard.sim.world.reference > docs/reference/simulate.md`. What it all means:
[guides/simulator.md](../guides/simulator.md).

## The object

[An example](simulate.json). Counts are of outages; seconds are rounded to a thousandth.

| key | meaning |
| --- | --- |"""
_WAYS: Final = (
    ("set", "the set in short, by the letters of [the guide](../guides/return.md)"),
    ("ways", "those of `reboot` (A), `output` (B), `sentinel` (C), `watchdog` (D), `rtc` (E) that this host names"),
    (
        "output",
        "what its UPS is said to do when utility returns in the countdown: cycles, aborts, stays_off, unknown; or null",
    ),
    ("policy", "of the BMC (P), in the outage: `always-on`; `lies`: said to be, and is not; `off`"),
    ("outages, went_off", "outages with this set, and those in which the host was off or dark"),
    ("stranded, stranded_broken", "those in which it stayed off; of them with a way that does not do what it promises"),
    ("stranded_seeds", "the first five of those"),
    (
        "back_by",
        "outages in which that switched it on; output: AC's return, after a cut that it had ordered; policy: any other",
    ),
    (
        "wait_s_mean",
        "seconds from utility's return (or off, if later) until it was on; mean of those that something brought back",
    ),
    ("excess_s_mean", "as above, of this set alone"),
)
_SETS: Final = """
### stranded_by_ways

One row for each set that occurred; at level `sockets` none, as nobody comes back there. Whoever is played with another
`--policy`, or in dry-run, has but P.

| key | meaning |
| --- | --- |"""
_SITE: Final = """
## The site file

A share is 0 to 1; a pair is [least, most]. What is not named keeps its default."""


def page() -> str:
    """Return the page."""
    lines = [_HEAD, *(f"| {keys} | {meaning} |" for keys, meaning in _KEYS)]
    lines += [_SETS, *(f"| {keys} | {meaning} |" for keys, meaning in _WAYS), _SITE]
    for name, section in Site.model_fields.items():
        default: Any = section.default
        lines += [
            "",
            f"### {name}",
            "",
            f"{section.description}",
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key, field in type(default).model_fields.items():
            lines.append(f"| {key} | {_shown(getattr(default, key))} | {field.description} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(key)}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
