"""What to do now: the state machine, its transitions, and the conditions that each of them rests on."""
