"""Checkpoints of one job on one file system: their parts, their layout on disk, and what training resumes from."""
