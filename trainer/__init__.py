"""The parallel trainer, organised around the checkpoint core."""

if __name__ != "titan_ckpt.trainer":
    raise ImportError("import titan_ckpt.trainer: the folder trainer/ installs only as a part of titan_ckpt")
