"""From what a hung or dead job left behind to the guilty rank and line. Runs without torch."""

if __name__ != "titan_ckpt.debug":
    raise ImportError("import titan_ckpt.debug: the folder debug/ installs only as a part of titan_ckpt")
