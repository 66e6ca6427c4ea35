"""What a person asks: one module or package for each family of verbs, and `main`, which finds the verb.

A verb that changes a running daemon asks the daemon; it does not write the journal or the settings by itself.
"""
