"""Signals to training jobs: the daemon's side (`effector`, `options`, `findings`), the root helper's (`helper`)."""
