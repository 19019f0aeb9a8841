"""torchtitan 0.3.0 saves with its own checkpoint manager; titan-ckpt opens, verifies, reshards and converts what it left.

    pip install torchtitan==0.3.0 'titan-ckpt[hf]'      # an environment of its own; no accelerator is needed
    python -m benchmarks.torchtitan_neighbour --dir /tmp/titan

Two ranks over gloo train torchtitan's Llama "debugmodel" for two steps under its FSDP2 and call `CheckpointManager.save`. Then
come the commands of docs/neighbours.md, each with what it prints, and two comparisons: the resharded checkpoint with
torchtitan's, both through plain `dcp.load`, and the export with what torchtitan's own adapter makes of the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule

from titan_ckpt.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent
RANKS, STEPS = 2, 2


def train(folder: str) -> None:
    """One rank: torchtitan's model, parallelisation, optimizer, scheduler and checkpoint manager."""
    # torchtitan takes the accelerator's name from torch at import, so torch is told "cpu" first.
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    dist.init_process_group("gloo")
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention has no backward on a CPU
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=RANKS)
    training = TrainingConfig(local_batch_size=2, seq_len=32, steps=STEPS, mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(parallelism.spmd_backend)
    whole = argparse.Namespace(training=training, parallelism=parallelism, debug=DebugConfig())
    spec.model.update_from_config(config=whole)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(),
        ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=2048).build(compile_config=CompileConfig())
    optimizers = default_adamw(lr=1e-3).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=STEPS)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=STEPS), dataloader=None, model_parts=[model],
        optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": _Progress()}, sd_adapter=None,
        base_folder=folder,
    )  # fmt: skip
    valid = torch.tensor(RANKS * 2 * 32)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 2048, (2, 33))
        with titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
            loss, _ = loss_fn(model(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), valid)
            loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        manager.save(step)
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


class _Progress:
    """What torchtitan's trainer keeps beside the model."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(STEPS, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def commands(folder: Path) -> list[list[str]]:
    """What a torchtitan user would type."""
    source = f"checkpoint/step-{STEPS}"
    (folder / "config.json").write_text(json.dumps(_config(), indent=1))
    return [
        ["titan-ckpt", "ls", "checkpoint"],
        ["titan-ckpt", "inspect", source, "layers.0.attention.*.weight"],
        ["titan-ckpt", "verify", source, "--data"],
        ["titan-ckpt", "reshard", source, "runs/four", "--mesh", "dp_shard=4"],
        ["titan-ckpt", "reshard", source, "runs/tp", "--mesh", "dp_shard=2,tp=2"],
        ["titan-ckpt", "verify", "runs/four", "--data"],
        ["titan-ckpt", "convert", "to-hf", "runs/tp", "hf", "--config", "config.json"],
        ["titan-ckpt", "convert", "to-hf", source, "hf-direct", "--config", "config.json"],
    ]


def _config() -> dict[str, Any]:
    """The config.json that a user has beside the weights that training began from; here the debugmodel's shape."""
    from torchtitan.models.llama3 import model_registry

    model = model_registry("debugmodel").model
    attention = model.layers[0].attention
    with torch.device("meta"):
        weights = model.build().state_dict()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": weights["layers.0.feed_forward.w1.weight"].shape[0],
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "tie_word_embeddings": model.enable_weight_tying,
    }


def compare(folder: Path) -> str:
    """Every tensor of both checkpoints through plain `dcp.load`; AssertionError if one differs."""
    source = open_checkpoint(str(folder / "checkpoint" / f"step-{STEPS}"))
    shapes = {entry.fqn: entry for entry in source.manifest.tensors}
    states = []
    for path in (f"checkpoint/step-{STEPS}", f"runs/four/step-{STEPS:08d}", f"runs/tp/step-{STEPS:08d}"):
        state = {
            fqn: torch.zeros(entry.global_shape, dtype=getattr(torch, entry.dtype)) for fqn, entry in shapes.items()
        }
        dcp.load(state, checkpoint_id=folder / path)
        states.append(state)
    different = [fqn for fqn in shapes for other in states[1:] if not torch.equal(states[0][fqn], other[fqn])]
    assert not different, different
    return f"plain dcp.load: {len(shapes)} tensors equal in torchtitan's checkpoint and both resharded ones"


def compare_export(folder: Path) -> str:
    """The two exports with torchtitan's own adapter; AssertionError if a tensor differs."""
    from safetensors.torch import load_file
    from torchtitan.models.llama3 import model_registry

    source = open_checkpoint(str(folder / "checkpoint" / f"step-{STEPS}"))
    spec = model_registry("debugmodel")
    weights = {entry.fqn: source.read(entry.fqn) for entry in source.manifest.tensors if "." in entry.fqn}
    weights = {
        fqn: tensor for fqn, tensor in weights.items() if not fqn.startswith(("optimizer", "train_state", "lr_"))
    }
    expected = spec.state_dict_adapter(spec.model, None).to_hf(weights)
    for name in ("hf", "hf-direct"):
        found = load_file(folder / name / "model.safetensors")
        assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
        assert all(torch.equal(expected[fqn], found[fqn]) for fqn in expected), name
    return f"to-hf: {len(expected)} tensors equal to what torchtitan's adapter makes, from either checkpoint"


def main() -> int:
    """Save, then walk through the commands."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchtitan_neighbour", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--dir", type=Path, required=True, help="a folder that does not exist yet")
    folder: Path = parser.parse_args().dir.resolve()
    if "RANK" in os.environ:
        train(str(folder))
        return 0
    folder.mkdir(parents=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m"]
    subprocess.run([*torchrun, "benchmarks.torchtitan_neighbour", "--dir", str(folder)], check=True)
    for command in commands(folder):
        sys.stdout.write(f"$ {shlex.join(command)}\n")
        done = subprocess.run(
            [sys.executable, "-m", "titan_ckpt", *command[1:]],
            cwd=folder,
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        sys.stdout.write(done.stdout.replace(f"{folder}/", ""))
        if done.returncode:
            sys.stdout.write(done.stderr)
            return done.returncode
    sys.stdout.write(f"{compare(folder)}\n{compare_export(folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
