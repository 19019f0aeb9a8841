"""Helpers of the tests alone; what scripts and benchmarks share is in tools/."""
