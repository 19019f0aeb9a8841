"""Test-only helpers; code shared with scripts and benchmarks is in tools/."""
