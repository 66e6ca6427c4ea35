"""Where a value stands in a device and which values are meant: what readings and commands of a profile share."""

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from powerguard.options import Options

_OID = re.compile(r"((0|1|2)|(?=\.))(\.(0|[1-9][0-9]{0,9})){1,127}")


def _is_oid(text: str) -> str:
    if not _OID.fullmatch(text):
        msg = "must be an OID (.4.1.0, or 1.3.6.1.2.1.33.1.4.1.0)"
        raise ValueError(msg)
    return text


OidText = Annotated[str, AfterValidator(_is_oid)]
"""A dotted OID; with a leading dot it continues the profile's `base`.

Not a `pattern`: pydantic compiles one for each place where it is named, which costs a daemon MBs.
"""

Number = int | float
Range = tuple[Number | None, Number | None]


def _ordered(span: Range) -> Range:
    low, high = span
    if low is not None and high is not None and low > high:
        msg = f"range [{low}, {high}] runs backwards"
        raise ValueError(msg)
    return span


Span = Annotated[Range, AfterValidator(_ordered)]


class Part(Options):
    """A part of a profile. Only whole profiles are read, so no validator of its own is built: that saves 1 MB."""

    model_config = ConfigDict(defer_build=True)


class Scalar(Part):
    """One object, by name and place."""

    object: str
    oid: OidText


class Condition(Part):
    """Another object must have one of these values (numbers, [low, high] ranges or OIDs).

    On a source: else it is not asked. On a command: else it is refused.
    """

    object: str
    oid: OidText
    is_: list[int | OidText | Span] = Field(alias="is", min_length=1)


class Rows(Part):
    """Only rows of a table whose other column has one of these values count.

    For tables that mix phases with banks, or a whole device with its parts: adding them up would count twice. Where
    the device does not answer the other column, no row counts, and the next source is asked.
    """

    object: str
    column: OidText
    is_: list[int] = Field(alias="is", min_length=1)
