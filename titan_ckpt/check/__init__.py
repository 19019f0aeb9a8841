"""Compare a checkpoint with what was saved (`verify`, `scan`) or with another checkpoint (`diff`). No torch, read-only.

Imports `checkpoint` and the rooms below it. Terms: problem (something that differs from what was saved), difference (something
that two checkpoints do not share).
"""
