"""Settings of the effector `rtc`. Light: reading the settings imports it."""

from typing import Final, Literal

from pydantic import Field

from powerguard.options import Options

RTC_DEVICE: Final = "/dev/rtc0"


class RtcOptions(Options):
    """The host's own clock, whose alarm can power it on when nothing else does (docs/guides/rtc.md).

    kind: none leaves it alone; device sets its wake alarm for an outage, and takes back what it has set.
    device: the clock; systemd/powerguard.rtc.rules gives rtc0 to the daemon's group.
    """

    kind: Literal["none", "device"] = Field(default="none", examples=["device"])
    device: str = Field(
        default=RTC_DEVICE,
        pattern=r"^/[^\x00]+$",
        max_length=4096,
        examples=[RTC_DEVICE],
        json_schema_extra={"x-wanted": "an absolute path"},
    )
