"""Terminal screens (Textual) for incidents, checkpoints, logs and training metrics. Runs without torch.

Layers, top down: `app`, `cli`, `screenshot`; `screens`; `widgets`; `session`; `data`; `rows`, `tasks`.
"""

if __name__ != "titan_ckpt.tui":
    raise ImportError("import titan_ckpt.tui: the folder tui/ installs only as a part of titan_ckpt")
