"""The verb `snmp`: probe, decode and test-profile, as the daemon would see a device."""
