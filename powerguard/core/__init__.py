"""The decision: pure. `decide.machine.step(policy, state, event)` returns the next state, actions and notes.

    model      what is known: readings, events, state; frozen plain data
    supply     is there utility?
    energy     how long does the battery last, and what is needed?
    decide     what to do now
    trainers   what trainers are asked to do
    comeback   how the host powers on again, and when training may start
    drill      a rehearsal of all this
    obligations.py  what is owed until it is confirmed, and who keeps it

Nothing here reads a clock, does input or output, or raises. Time is an event. The same state and event
give the same answer.
"""
