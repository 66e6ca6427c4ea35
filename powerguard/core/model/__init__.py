"""What is known: readings, events, actions, policy and state, as frozen plain data, and how it is stored.

Nothing here decides anything or does any sum.
"""
