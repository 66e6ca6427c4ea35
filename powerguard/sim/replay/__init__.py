"""A recorded outage through the decisions of today."""
