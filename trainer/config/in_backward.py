"""What `optimizer.in_backward` cannot be had with: all that needs every gradient of a step at once."""

from __future__ import annotations

from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import DATA_AXES
from titan_ckpt.trainer.seams.step import Hooks


def check_in_backward(config: Any, mesh: MeshSpec) -> None:
    """ConfigError for the first setting of a TrainConfig that is not as it must be."""
    if not config.optimizer.in_backward:
        return
    optimizer, extension, train = config.optimizer, config.extension, config.train
    samples = train.microbatch_size * mesh.degree(DATA_AXES)
    hooks = Hooks if extension.hooks is None else type(extension.hooks)
    is_adamw = optimizer.name == "adamw" and not any(group.name == "muon" for group in optimizer.groups)
    needs = {
        "optimizer.grad_clip = 0": not optimizer.grad_clip,
        'optimizer.not_finite = "stop"': optimizer.not_finite == "stop",
        'optimizer.name = "adamw", without groups of muon': is_adamw,
        "the trainer's own rules, not an OptimizerSpec": extension.optimizer is None,
        "the trainer's own step, not a train_step": extension.train_step is None,
        "hooks without after_backward": hooks.after_backward is Hooks.after_backward,
        "mesh.pp = 1, since a pipeline adds up microbatches": mesh.degree("pp") == 1,
        "mesh.cpu_offload = false": not config.mesh.cpu_offload,
        f"train.global_batch_size <= {samples}, one microbatch per data rank": train.global_batch_size <= samples,
    }
    if wrong := next((text for text, holds in needs.items() if not holds), None):
        raise ConfigError(f"optimizer.in_backward updates a weight before all gradients are there; it needs {wrong}")
