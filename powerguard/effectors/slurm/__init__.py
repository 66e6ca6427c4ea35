"""How does Slurm learn of an outage? The root helper powerguard-slurm, the effector that asks it, and its findings."""
