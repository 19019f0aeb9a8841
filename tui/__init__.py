"""Textual screens over `titan_ckpt.debug` and the core. Runs without torch."""

if __name__ != "titan_ckpt.tui":
    raise ImportError("import titan_ckpt.tui: the folder tui/ installs only as a part of titan_ckpt")
