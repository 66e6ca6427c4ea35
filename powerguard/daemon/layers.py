"""The ways back as a person sees them: one line for each layer, armed, blocked or off, and whether the race is covered.

The race: utility returns after the commit and before the UPS has cut its output, so AC never drops and the BMC's policy
never acts (docs/guides/return.md). The policy (P) and the late reboot (A) do not cover it: the first needs AC to drop,
the second leaves the seconds between the last unit's stop and the power-off open.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from powerguard.core.actions import Way
from powerguard.core.policy import Policy
from powerguard.daemon.port import BmcView, WayView

LETTERS: Final = {Way.OUTPUT: "B", Way.RTC: "E", Way.SENTINEL: "C", Way.WATCHDOG: "D"}
COVERS: Final = frozenset("BCDE")
_OFF: Final = {
    Way.OUTPUT: "the output of no UPS is switched off by this host (ups.NAME.output_off)",
    Way.RTC: "rtc.kind is none",
    Way.SENTINEL: "sentinel.kind is none",
    Way.WATCHDOG: "bmc.watchdog is false",
}
UNCOVERED: Final = (
    "if power returns while this host shuts down, AC never drops and the BMC does not switch it on again; nothing is "
    "armed for that case"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One way back. letter: A to E, or P; name: policy, late_reboot, or a `Way`; ups: of way output, else "".

    stands: armed (asked for, and it could be), blocked (why), off (the settings name none), unknown (not asked yet).
    checked_at_s: when it was asked for, seconds of CLOCK_BOOTTIME; None: not asked, or there is nobody to ask.
    """

    letter: str
    name: str
    stands: str
    why: str = ""
    ups: str = ""
    checked_at_s: float | None = None


def layers(policy: Policy, bmc: BmcView | None, ways: Iterable[WayView]) -> tuple[Layer, ...]:
    """Return every layer, P and A first, then B to E."""
    views = list(ways)
    found = [_policy(bmc), _late(policy)]
    for way, letter in sorted(LETTERS.items(), key=lambda pair: pair[1]):
        mine = [view for view in views if view.way is way]
        found += [_way(policy, view, letter) for view in mine]
        if not mine:
            found.append(Layer(letter=letter, name=way.value, stands="off", why=_OFF[way]))
    return tuple(found)


def _policy(bmc: BmcView | None) -> Layer:
    if bmc is None:
        return Layer(letter="P", name="policy", stands="off", why="bmc.kind is none")
    if bmc.verified:
        return Layer(letter="P", name="policy", stands="armed", checked_at_s=bmc.checked_at_s)
    if not bmc.error and bmc.checked_at_s is None:
        return Layer(letter="P", name="policy", stands="unknown", why="not asked yet")
    why = bmc.error or f"the policy is {bmc.policy or 'not told'}"
    return Layer(letter="P", name="policy", stands="blocked", why=why, checked_at_s=bmc.checked_at_s)


def _late(policy: Policy) -> Layer:
    if policy.late_reboot:
        return Layer(letter="A", name="late_reboot", stands="armed")
    why = "host.late_reboot is false, or host.kind is not systemd"
    return Layer(letter="A", name="late_reboot", stands="off", why=why)


def _way(policy: Policy, view: WayView, letter: str) -> Layer:
    stands, why = "unknown" if view.ready is None else "armed" if view.ready else "blocked", view.why
    if view.way is Way.OUTPUT and view.ready:
        others = [each.policy.ups for each in policy.feeds if each.policy.ups not in policy.outputs]
        if others:
            stands, why = "blocked", f"{', '.join(others)} would not go off with it, so AC would never drop here"
        elif view.returns != "cycles":
            told = {"aborts": "aborts the cut", "stays_off": "stays off"}.get(view.returns, "is not known to cycle")
            stands, why = "blocked", f"when utility returns in its countdown, this UPS {told}"
    why = "not asked yet" if stands == "unknown" else why
    return Layer(
        letter=letter, name=view.way.value, stands=stands, why=why, ups=view.ups, checked_at_s=view.checked_at_s
    )


def uncovered(known: Sequence[Layer]) -> str:
    """Say what is wrong where no layer covers the race, with what blocks each that there is; "" where one does."""
    if covers(known):
        return ""
    blocked = "; ".join(
        f"{' '.join(word for word in (each.letter, each.name, each.ups) if word)}: {each.why}"
        for each in known
        if each.letter in COVERS and each.stands == "blocked"
    )
    return f"{UNCOVERED} ({blocked})" if blocked else UNCOVERED


def covers(known: Iterable[Layer]) -> bool:
    """Say whether a layer that covers the race could be armed. Of several outputs each must be."""
    stands: dict[str, set[str]] = {}
    for each in known:
        stands.setdefault(each.letter, set()).add(each.stands)
    return any(stands.get(letter) == {"armed"} for letter in COVERS)
