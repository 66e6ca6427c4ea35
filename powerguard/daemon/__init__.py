"""What runs the core on a host: the loop, the bulkhead around each action, the journal, and what people see of it.

It decides nothing: `core` does. `wiring` is the one place that knows every source and every effector.
"""
