"""Requests to a running daemon: the admin socket, and the hint socket of hooks."""
