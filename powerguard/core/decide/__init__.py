"""What to do now: the state machine, its transitions, and their conditions.

Read an outage from top to bottom: `machine` (an event, and what it causes), `transitions` (where each cause leads, and
what is ordered then), `conditions` (when a cause holds). `turn` is the step that is being built. The other parts of the
core use `turn` and `conditions` too, and know neither the machine nor its transitions.
"""
