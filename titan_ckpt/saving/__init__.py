"""Save a state dict from all ranks: agree, stage, upload, commit, mirror. Needs torch.

Imports `upkeep`, `checkpoint`, `state` and the rooms below them. Terms: attempt (one try at saving a step, with a folder of its
own), share (the division of a state over the ranks), part (what one rank stored), coordinator (rank 0, which commits).
"""
