"""What runs next to a training loop: the step hook, requests for checkpoints, the writer thread, the HTTP endpoint."""
