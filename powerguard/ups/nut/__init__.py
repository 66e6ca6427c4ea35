"""NUT's upsd as a source, and as the way to order a UPS's output."""
