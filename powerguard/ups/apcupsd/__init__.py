"""apcupsd's network information server as a source."""
