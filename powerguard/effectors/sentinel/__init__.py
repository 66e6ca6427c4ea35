"""The host's side of the sentinel: another host that powers this one on (docs/reference/sentinel.md)."""
