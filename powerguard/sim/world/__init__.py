"""An outage of one host or of a rack, played second by second: battery, host, trainer and faults drawn from a seed.

The decisions are those of `core`; `invariants` says what must hold after each of them.
"""
