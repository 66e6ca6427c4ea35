"""The verb `doctor`: every check before an outage, each with a remedy."""
