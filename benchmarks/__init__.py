"""Benchmarks; each writes a section of docs/performance.md, `make bench` runs those that fit the machine."""
