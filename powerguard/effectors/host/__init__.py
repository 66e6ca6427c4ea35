"""The host itself: powered off by its deadline, file systems flushed first, looked at after a return."""
