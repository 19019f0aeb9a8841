"""Bytes that others wrote, read within stated bounds: JSON documents, pickles and the values in them, compressed files. No I/O.

A value is read in two phases: `value_records` follows its pickle into records of calls, and makes none; `value_build` makes the
value from the records, by constructors that are known and classes that the caller allows.

Everything here raises DamagedError for what it refuses, and takes time and memory linear in the bytes it is given.
"""
