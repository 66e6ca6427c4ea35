"""The network cards of UPSes, over SNMP: finding out what a card is, polling it, ordering its output, and its traps."""
