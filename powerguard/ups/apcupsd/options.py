"""Settings of the `apcupsd` source. Kept apart, so that reading the settings loads no network code."""

from typing import Literal

from pydantic import Field

from powerguard.options import Host, Options


class ApcupsdOptions(Options):
    """A UPS that apcupsd watches, on this host or another: its network information server is asked."""

    kind: Literal["apcupsd"]
    host: Host = Field(
        default="127.0.0.1",
        description="Address or name of the apcupsd that reads the UPS itself; never that of a net slave, which "
        "does not pass on the age of its values.",
        examples=["10.0.0.9"],
    )
    port: int = Field(default=3551, ge=1, le=65535, description="TCP port: NISPORT in its apcupsd.conf.")
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="UPSNAME that apcupsd must report, so that another UPS behind that port is never mistaken for "
        "this one.",
        examples=["rack-a"],
    )
    leaves_shutdown: bool = Field(
        default=False,
        description="true: that apcupsd calls powerguard's scripts (config/apcupsd) and leaves the shutdown to "
        "powerguard, so its SHUTTING DOWN is not an order to be off within `forced_shutdown_delay_s`.",
    )
    poll_s: float = Field(
        default=0.25,
        ge=0.2,
        le=10.0,
        description="Seconds from one poll to the next. apcupsd's values change only as often as it reads the UPS: "
        "set its POLLTIME to 1.",
    )
    timeout_s: float = Field(
        default=1.0,
        ge=0.5,
        le=5.0,
        description="Seconds to wait for an answer; on battery at most 0.8, until the source counts as lost.",
    )
