"""The figures of the README, measured where you run it. `python -m bench [name ...]`."""
