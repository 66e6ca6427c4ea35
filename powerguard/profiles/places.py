"""Where a value stands in a device and which values are meant: what readings and commands of a profile share."""

from typing import Annotated

from pydantic import AfterValidator, Field

from powerguard.options import Options

_ABSOLUTE = r"(0|1|2)(\.(0|[1-9][0-9]*))+"
_RELATIVE = r"(\.(0|[1-9][0-9]*))+"
OidText = Annotated[
    str,
    Field(
        pattern=rf"^({_ABSOLUTE}|{_RELATIVE})$",
        max_length=512,  # not counted in the pattern: that costs 4 MB in pydantic's regex engine
        examples=[".4.1.0", "1.3.6.1.2.1.33.1.4.1.0"],
    ),
]
"""A dotted OID; with a leading dot it continues the profile's `base`."""

Number = int | float
Range = tuple[Number | None, Number | None]


def _ordered(span: Range) -> Range:
    low, high = span
    if low is not None and high is not None and low > high:
        msg = f"range [{low}, {high}] runs backwards"
        raise ValueError(msg)
    return span


Span = Annotated[Range, AfterValidator(_ordered)]


class Scalar(Options):
    """One object, by name and place."""

    object: str
    oid: OidText


class Condition(Options):
    """Another object must have one of these values (numbers, [low, high] ranges or OIDs).

    On a source: else it is not asked. On a command: else it is refused.
    """

    object: str
    oid: OidText
    is_: list[int | OidText | Span] = Field(alias="is", min_length=1)


class Rows(Options):
    """Only rows of a table whose other column has one of these values count.

    For tables that mix phases with banks, or a whole device with its parts: adding them up would count twice. Where
    the device does not answer the other column, no row counts, and the next source is asked.
    """

    object: str
    column: OidText
    is_: list[int] = Field(alias="is", min_length=1)
