"""The verbs over checkpoints: list, verify, restore, prune, seal."""
