"""What if one job runs over several hosts, under a Slurm that hangs, lies and drains at the same time?"""
