"""The files of a checkpoint, read and written without torch (docs/format.md). Imports store, sharding and the base modules.

Terms: attempt (the folder of one save), chunk (a stored box of a tensor), blob (the bytes of one chunk or value in a data file,
as `torch.save` writes them), payload (the tensor's bytes in a blob), envelope (the rest of the blob), codec (how a payload is
encoded), manifest (our index), COMMIT (the file that makes a checkpoint exist), foreign (written by plain DCP, not by us).
"""
