"""Is there utility? What several sources of one UPS say together, and several UPSes of one host.

This package does not know how long a battery lasts, nor what a trainer is.
"""
