"""The second level of the simulator: the real loop, bulkhead and journal, in virtual time."""
