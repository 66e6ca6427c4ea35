"""An invariant that does not hold, as an error."""


class Violation(AssertionError):  # noqa: N818 - it is one
    """An invariant that does not hold; its text is the invariant."""


def hold(condition: object, sentence: str) -> None:
    """Raise Violation where the condition is not true."""
    if not condition:
        raise Violation(sentence)
