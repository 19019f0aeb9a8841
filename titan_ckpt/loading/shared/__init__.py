"""A load in which each part of a tensor is read once for all ranks that hold it."""
