"""Asynchronous tensor parallelism: collectives and matrix products in pieces that overlap.

`around` decomposes them in plain code, on any device; `regions` applies that to a model; with compiled blocks `compiled` leaves
the same decomposition to the compiler, which needs symmetric memory. See docs/parallelism.md.
"""
