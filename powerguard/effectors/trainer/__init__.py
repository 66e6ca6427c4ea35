"""How a trainer is asked: by its HTTP endpoint, by a signal, or by a program, and how the answer is checked."""
