"""What the host's trainers are asked to do, and what is done where one does not answer."""
