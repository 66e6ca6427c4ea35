"""How long does the battery last, what is still to be done, and does it fit? Sums alone; no decision is made here."""
