"""Benchmarks. Each writes a section of docs/performance.md; `make bench` runs those the machine supports."""
