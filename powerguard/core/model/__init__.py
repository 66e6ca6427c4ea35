"""What is known: readings, events, actions, policy and state, as frozen plain data, and how it is stored.

No decision and no calculation is made here.
"""
