"""A figure: many measurements, told as median, 99th percentile and worst."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the measurements lie; of few, the next higher one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured, in which unit. bar: what the project holds itself to; more_is_better turns it round."""

    name: str
    unit: str
    values: tuple[float, ...]
    bar: str = ""

    def __str__(self) -> str:
        numbers = f"median {quantile(self.values, 0.5):.4g}"
        if len(self.values) >= 20:
            numbers += f", p99 {quantile(self.values, 0.99):.4g}"
        numbers += f", min {min(self.values):.4g}, max {max(self.values):.4g} {self.unit}"
        return f"{self.name}: {numbers} (n={len(self.values)})" + (f"; bar: {self.bar}" if self.bar else "")

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "name": self.name,
            "unit": self.unit,
            "n": len(self.values),
            "median": quantile(self.values, 0.5),
            "p99": quantile(self.values, 0.99),
            "min": min(self.values),
            "max": max(self.values),
            "bar": self.bar,
        }
