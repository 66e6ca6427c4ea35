"""The verbs `install` and `uninstall`: units, helpers and rules put in place and taken away."""
