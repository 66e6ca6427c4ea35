"""All moves: which cause ends which phase, and which phase follows. docs/ARCHITECTURE.md has the picture."""

from enum import StrEnum

from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Online, Phase, Recovery, Shutdown


class Cause(StrEnum):
    """Why a phase ends."""

    BATTERY = "battery confirmed"
    POWER_OFF_ORDERED = "output-off countdown or FSD"
    CALIBRATION_LOW = "calibration ran low"
    UTILITY_BACK = "utility back"
    CHECKPOINT_NEEDED = "checkpoint needed"
    CHECKPOINT_DURABLE = "checkpoint durable"
    UTILITY_STABLE = "utility stable"
    COMMIT = "commit point"
    ABORTED = "operator aborts"
    NEXT_BOOT = "next boot"
    RESUMED = "training resumed"
    REHEARSED = "utility back after a recorded power-off"


TABLE: dict[tuple[type[Phase], Cause], type[Phase]] = {
    (Online, Cause.BATTERY): OnBattery,
    (Online, Cause.POWER_OFF_ORDERED): EmergencyCheckpoint,
    (Online, Cause.CALIBRATION_LOW): EmergencyCheckpoint,
    (OnBattery, Cause.UTILITY_BACK): Online,
    (OnBattery, Cause.CHECKPOINT_NEEDED): EmergencyCheckpoint,
    (OnBattery, Cause.NEXT_BOOT): Recovery,
    (EmergencyCheckpoint, Cause.CHECKPOINT_DURABLE): Holding,
    (EmergencyCheckpoint, Cause.UTILITY_STABLE): Online,
    (EmergencyCheckpoint, Cause.ABORTED): OnBattery,
    (EmergencyCheckpoint, Cause.COMMIT): Shutdown,
    (EmergencyCheckpoint, Cause.NEXT_BOOT): Recovery,
    (Holding, Cause.UTILITY_STABLE): Online,
    (Holding, Cause.ABORTED): OnBattery,
    (Holding, Cause.COMMIT): Shutdown,
    (Holding, Cause.NEXT_BOOT): Recovery,
    (Shutdown, Cause.NEXT_BOOT): Recovery,
    (Shutdown, Cause.REHEARSED): Online,
    (Recovery, Cause.RESUMED): Online,
    (Recovery, Cause.COMMIT): Shutdown,
}
"""Every move there is. NEXT_BOOT is made by `recovery.restore`, when the daemon starts; all others by `step`."""

_NAMES: dict[type[Phase], str] = {
    Online: "online",
    OnBattery: "on_battery",
    EmergencyCheckpoint: "emergency_checkpoint",
    Holding: "holding",
    Shutdown: "shutdown",
    Recovery: "recovery",
}


def phase_name(phase: Phase | type[Phase]) -> str:
    """Return the phase's name in status, metric and log."""
    return _NAMES[phase if isinstance(phase, type) else type(phase)]
