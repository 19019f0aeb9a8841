"""Rewrite tensors from one layout of files into another, streamed, in bounded memory; resharding and conversion both use it.

source chunk: a box of a source tensor, as a byte range of an object. region: a box of a source tensor in a target file.
file group: target files written together. unit: the read requests that fit one buffer, and the actions on what they read.
"""
