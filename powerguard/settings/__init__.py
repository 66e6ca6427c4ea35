"""The operator's settings: schema, loading, and the core's policy. Importing this package imports no module."""
