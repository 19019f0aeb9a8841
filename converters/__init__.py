"""Hugging Face, torchtitan and plain torch files, to and from checkpoints."""

if __name__ != "titan_ckpt.converters":
    raise ImportError("import titan_ckpt.converters: the folder converters/ installs only as a part of titan_ckpt")
