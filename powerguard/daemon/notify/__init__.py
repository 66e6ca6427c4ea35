"""Who hears of an outage? Messages to people, from the core's notes to what the other side answered.

Begin at `messenger`. `composer` decides what is worth a message and puts it into a text; `queue` keeps messages
over a power-off; `targets` delivers them, mail and Apprise in a `child`. Nothing waits for a message: the loop only
hands its notes over, and no other part of the daemon asks how a delivery went before it acts.
"""
