"""The recorder inside a training process: black box, dumps, stacks, signals. Imports incident.

Terms: ring (the fixed number of records in a black box), site (a call site of the user's), beat (a tick of the watching thread).
"""
