"""The operator's settings: schema, loading, what the core gets of them. Importing this package imports nothing."""
