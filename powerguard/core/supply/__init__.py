"""Is there utility? What several sources of one UPS say together, and several UPSes of one host.

Nothing here knows how long a battery lasts, nor what a trainer is.
"""
