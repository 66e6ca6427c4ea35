"""Power-on method C on a management node: powers on hosts that went off in order (docs/guides/sentinel.md)."""
