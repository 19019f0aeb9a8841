"""One rank of torchtitan 0.3.0 on CPU and gloo for trainer_vs_torchtitan.py, in an environment that has torchtitan."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.turns import take_turns
from tools.training.torchtitan_model import build, debug_spec, mixture_spec, token_loss


def main(job: dict[str, Any]) -> None:
    """Train on random tokens, a step at a time."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed import utils as titan

    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    batch = job["batch_size"] // job["dp_shard"]
    mesh = {axis: job[axis] for axis in ("dp_shard", "tp", "pp", "ep")}
    spec = mixture_spec(job["mixture_layers"]) if job["mixture_layers"] else debug_spec()
    model = build(spec, local_batch_size=batch, seq_len=job["seq_len"], **mesh)
    optimizer = default_adamw(lr=1e-3).build(model_parts=model.parts)
    loss_fn = token_loss()
    valid = torch.tensor(job["batch_size"] * job["seq_len"])

    def step() -> None:
        tokens = torch.randint(0, 2048, (batch, job["seq_len"] + 1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        with model.context():
            if model.schedule is not None:
                losses: list[torch.Tensor] | None = [] if model.is_last else None
                target = labels if model.is_last else None
                extra = {"loss_kwargs": {"global_valid_tokens": valid}, "return_outputs": False}
                model.schedule.step(*((inputs,) if model.is_first else ()), target=target, losses=losses, **extra)
            else:
                loss, _ = loss_fn(model.parts[0](inputs), labels, valid)
                loss.backward()
        weights = [p for part in model.parts for p in part.parameters()]
        titan.clip_grad_norm_(
            weights, 1.0, foreach=True, pp_mesh=model.dims.get_optional_mesh("pp"), ep_enabled=job["ep"] > 1
        )
        optimizer.step()

    take_turns(step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
