"""Layer C on a management node: powers on hosts that went off in order, and only those (docs/guides/sentinel.md)."""
