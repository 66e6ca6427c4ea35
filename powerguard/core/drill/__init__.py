"""A rehearsal of an outage on the real host: whether it may begin, its course, its measures and its end.

A drill orders what an outage would, and undoes it. It changes no phase and never commits: a real outage takes over from
it, and the real rules decide.
"""
