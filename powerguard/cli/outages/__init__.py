"""The verbs on past outages: history, explain, report, replay."""
