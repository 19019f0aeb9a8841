"""What schedulers and cluster managers write of jobs and hosts."""
