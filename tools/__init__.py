"""Shared by tests, scripts and benchmarks; imports none of them."""
