"""Bytes that others wrote, read within stated bounds: JSON documents, pickles, compressed files. No I/O.

Everything here raises DamagedError for what it refuses, and takes time and memory linear in the bytes it is given.
"""
