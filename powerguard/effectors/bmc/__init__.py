"""The BMC: makes sure, by reading back, that the host powers on when AC returns."""
