"""Load a checkpoint into a state dict of tensors, from any mesh to any mesh. Needs torch.

Imports `checkpoint`, `state` and the rooms below them. Terms: request (a byte range to read), group (requests that are read
together), region (the part of a box that lies in one chunk).
"""
