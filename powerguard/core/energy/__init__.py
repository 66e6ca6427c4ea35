"""How long does the battery last, what is still to be done, and does it fit?

Calculations only; no decision is made here.
"""
