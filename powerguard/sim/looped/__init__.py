"""The second and the third level of the simulator: the real loop in virtual time, and the real wires in real time."""
