"""How the host comes back: methods of powering on, the gate at boot, and what is done when the daemon starts.

`methods` and `gate` order what a phase asks of them and change no phase. Only `recovery`, when the daemon starts, puts
a phase in place, and only from a state that `validation` has let through. `unseen` says whether the boot before ended
in a loss of power that was no outage.
"""
