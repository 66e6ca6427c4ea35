"""Random numbers by concern: each question of chance has a generator of its own.

So switching one fault off does not move the others, and what happens at a moment of the world's time does not depend
on how often a policy has asked before.
"""

from random import Random


def stream(seed: int, concern: str) -> Random:
    """Return the generator of one concern of one outage; the same two always give the same numbers."""
    return Random(f"{concern}/{seed}")  # A text is hashed whole: neighbouring seeds have nothing in common.


def log_uniform(chance: Random, low: float, high: float) -> float:
    """Return a number between low and high, every factor equally likely."""
    return float(low * (high / low) ** chance.random())


def uniform(chance: Random, bounds: tuple[float, float]) -> float:
    """Return a number between the two bounds."""
    low, high = bounds
    return low + (high - low) * chance.random()
