"""A rehearsal of an outage on the real host: whether it may begin, its course, its measures and its end."""
