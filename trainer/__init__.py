"""The parallel trainer. Rooms, top down: run, launch, data, config, parallel and report, model; `device_mesh` below them all."""

if __name__ != "titan_ckpt.trainer":
    raise ImportError("import titan_ckpt.trainer: the folder trainer/ installs only as a part of titan_ckpt")
