"""A model on a mesh: tensor, context and pipeline parallelism, FSDP, precision, recomputation, and the sharded optimizer.

Terms: partial (a gradient that must still be summed over tp), stage (a pipeline stage), tied (one weight as embedding and head).
Imports `model` and `device_mesh`.
"""
