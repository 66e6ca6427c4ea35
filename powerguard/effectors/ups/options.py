"""Settings of way B: the UPS cuts its output and gives it back. Loads no protocol, so that reading them stays cheap."""

from typing import Literal, Self

from pydantic import Field, model_validator

from powerguard.options import Options, Secret


class OutputOffOptions(Options):
    """Way B: the one host whose settings have this orders the UPS's output off, for itself and all others on it."""

    by: Literal["snmp", "nut"] = Field(
        description="The source of this UPS that the order goes through: its card (SETs), or upsd (shutdown.return).",
        examples=["snmp"],
    )
    host: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="`host` of that source, where the UPS has several of the kind.",
        examples=["10.0.0.5"],
    )
    control: Literal["off_with_return", "reboot", "outlet_off_with_return", "outlet_reboot"] = Field(
        default="off_with_return",
        description="Command of the UPS's family that is given (docs/guides/return.md). An outlet's where only that "
        "one feeds this host. Not for nut, which has shutdown.return.",
    )
    outlet: str | None = Field(
        default=None,
        pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$",
        description="Index of the outlet or outlet group, for the controls of one.",
        examples=["1"],
        json_schema_extra={"x-wanted": "a table index, such as '1' or '1.2'"},
    )
    community: Secret | None = Field(
        default=None, description="Community that may write, with SNMP 1 and 2c; the source's own when not set."
    )
    dedicated_network: bool = Field(
        default=False,
        description="true: nobody else can reach the network that the order goes over. Needed unless it is protected: "
        "SNMP version 3 with `auth` and `priv`, or a upsd on this host or with tls: required.",
    )
    return_after_s: float = Field(
        default=30,
        ge=5,  # power supplies hold a host up for less, and a BMC must see its AC gone
        le=600,
        description="Seconds from output off, or from utility's return, to output on; rounded up as the UPS needs it.",
        examples=[30],
    )
    returns: Literal["cycles", "aborts", "stays_off"] | None = Field(
        default=None,
        description="What this very UPS does when utility returns while it counts down, as somebody has tried it. Not "
        "set: what its family's file says, and unknown for nut.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        of_outlet = self.control.startswith("outlet_")
        if of_outlet and self.outlet is None:
            msg = f"control {self.control} needs outlet"
            raise ValueError(msg)
        if self.outlet is not None and not of_outlet:
            msg = f"outlet belongs to outlet_off_with_return and outlet_reboot, and control is {self.control}"
            raise ValueError(msg)
        if self.by == "nut" and (self.control != "off_with_return" or self.community is not None):
            named = "community" if self.community is not None else "control"
            msg = f"{named} belongs to by: snmp; nut has shutdown.return and the source's own user"
            raise ValueError(msg)
        return self
