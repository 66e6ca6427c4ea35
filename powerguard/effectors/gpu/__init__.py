"""GPU power limits: lowered on battery and put back whatever happens, by a root helper. Imports nothing."""
