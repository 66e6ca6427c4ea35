"""powerguard: when the power fails, training loses nothing and the host comes back. Imports nothing."""
