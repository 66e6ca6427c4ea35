"""Families of UPSes and rack PDUs: one YAML file each, and the pure decoder that makes readings of a device's answers.

Nothing here opens a socket or sends anything: `powerguard.ups.snmp` does.
"""
