"""GPU power limits: lowered on battery and put back in any case, by a root helper."""
