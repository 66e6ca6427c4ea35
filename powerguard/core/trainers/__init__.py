"""What the host's trainers are asked to do, and what is done where one does not answer.

This package knows the budget, and by it what a checkpoint may still take. It changes no phase, powers nothing off, and
does not know how the host comes back.
"""
