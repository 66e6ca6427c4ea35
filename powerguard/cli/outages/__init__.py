"""The verbs over outages that are past: history, explain, report, replay."""
