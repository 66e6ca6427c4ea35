"""Settings of the effector `gpu`: whether the power limits of GPUs are lowered on battery, and how far."""

from typing import Final, Literal

from pydantic import Field

from powerguard.options import Options

GPU_SOCKET: Final = "/run/powerguard-gpu/gpu.sock"
"""Where powerguard-gpu.socket listens (systemd/powerguard-gpu.socket)."""


class GpuOptions(Options):
    """Whether GPUs are slowed down on battery, so that it lasts longer.

    kind: none leaves GPUs alone; nvml lowers the power limits of NVIDIA GPUs through the root helper powerguard-gpu.
    cap_share: the limit on battery as a share of the limit found, never below what the GPU allows. It is used only
        once a drill has measured that it pays.
    socket: where the helper listens; differs from the default in tests and in unusual layouts.
    """

    kind: Literal["none", "nvml"] = Field(default="none", examples=["nvml"])
    cap_share: float = Field(
        default=0.6,
        ge=0.2,  # below stands what no GPU can be set to
        le=0.95,  # above it is not worth a root helper
        examples=[0.6],
    )
    socket: str = Field(
        default=GPU_SOCKET,
        pattern=r"^/[^\x00]+$",
        max_length=107,  # sun_path of unix(7) has 108 bytes
        examples=[GPU_SOCKET],
        json_schema_extra={"x-wanted": "an absolute path of at most 107 characters"},
    )
