"""What a power cut leaves: modelled over a recording disk (recording.py, states.py), and real (loops.py)."""
