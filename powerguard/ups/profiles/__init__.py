"""Families of UPSes and rack PDUs: one YAML file each, and the pure decoder that makes readings of a device's answers.

This package does not open a socket: `powerguard.ups.snmp` does.
"""
