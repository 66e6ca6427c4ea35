"""Who yields readings of a UPS: `snmp`, `nut`, `apcupsd`, and the host's own `network` as a witness.

A source polls, decodes and publishes readings. It makes no decision, and is independent of trainers, effectors and
settings.
"""
