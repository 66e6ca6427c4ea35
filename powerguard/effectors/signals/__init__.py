"""Signals to training jobs: the daemon's side (`effector`), the root helper's (`helper`)."""
