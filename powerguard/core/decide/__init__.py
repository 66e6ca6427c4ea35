"""What to do now: the state machine, its transitions, and their conditions."""
