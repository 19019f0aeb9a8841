"""A state dict and its ranks as saving and loading see them, in torch. Imports format, sharding and the base modules.

Terms: state dict (FQN -> value), FQN (dot-joined name of a value), local shard (the box of a tensor that this rank holds), rank
group (all ranks of the job; rank 0 is the coordinator, which commits).
"""
