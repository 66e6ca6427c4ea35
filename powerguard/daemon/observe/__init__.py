"""The public view of a running daemon: status, readiness, metrics, the budget's terms, the HTTP port."""
