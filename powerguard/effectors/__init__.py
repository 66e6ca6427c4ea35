"""How an action is carried out: one package for each peer (BMC, UPS output, trainer, host, GPU, scheduler ...).

An effector does one order within its deadline and says how it ended. It makes no decision and orders no other effector.
What needs root is a helper of its own with a closed list of words.
"""
