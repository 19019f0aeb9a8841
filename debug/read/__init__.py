"""From files to a Run: dumps, black boxes, stacks, logs and exit codes. Imports incident.

A damaged file becomes a flag, never an error. Terms: evidence file (a file that may be read), snapshot (one dump of a rank).
"""
