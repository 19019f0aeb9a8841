"""Open, verify, reshard and convert a checkpoint that torchtitan 0.3.0 saved with its own checkpoint manager.

    pip install torchtitan==0.3.0 'titan-ckpt[hf]'      # in a separate environment; no accelerator needed
    python -m benchmarks.checkpoints.torchtitan_neighbour --dir /tmp/titan

Two ranks over gloo train torchtitan's Llama "debugmodel" for two steps under its FSDP2 and call
`CheckpointManager.save`. Then run the commands of docs/neighbours.md, print their output, and compare the resharded
checkpoint with torchtitan's, both through plain `dcp.load`, and the export with the output of torchtitan's own adapter
for the same weights.
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

from titan_ckpt.checkpoint.open import open_checkpoint
from tools.paths import ROOT
from tools.training.torchtitan_model import VOCABULARY, TitanTrainState, build, debug_spec, token_loss

RANKS, STEPS, BATCH, LENGTH = 2, 2, 2, 32


def train(folder: str) -> None:
    """One rank: torchtitan's model, parallelisation, optimizer, scheduler and checkpoint manager."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    dist.init_process_group("gloo")
    model = build(debug_spec(), local_batch_size=BATCH, seq_len=LENGTH)
    loss_fn = token_loss()
    optimizers = default_adamw(lr=1e-3).build(model_parts=model.parts)
    progress = TitanTrainState()
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=STEPS)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=STEPS), dataloader=None, model_parts=model.parts,
        optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": progress}, sd_adapter=None,
        base_folder=folder,
    )  # fmt: skip
    valid = torch.tensor(RANKS * BATCH * LENGTH)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        with model.context():
            loss, _ = loss_fn(model.parts[0](tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), valid)
            loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        progress.step, progress.ntokens_seen = step, step * BATCH * LENGTH
        manager.save(step)
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


def commands(folder: Path) -> list[list[str]]:
    """Run the command as a torchtitan user would type it."""
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
    """The config.json that comes with the initial weights; here with the debugmodel's shape."""
    model = debug_spec().model
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
    """Compare all tensors of both checkpoints through plain `dcp.load`; AssertionError if one differs."""
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
    """Compare both exports with torchtitan's own adapter; AssertionError if a tensor differs."""
    from safetensors.torch import load_file

    source = open_checkpoint(str(folder / "checkpoint" / f"step-{STEPS}"))
    spec = debug_spec()
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
        prog="python -m benchmarks.checkpoints.torchtitan_neighbour", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--dir", type=Path, required=True, help="a folder that does not exist yet")
    folder: Path = parser.parse_args().dir.resolve()
    if "RANK" in os.environ:
        train(str(folder))
        return 0
    folder.mkdir(parents=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m"]
    subprocess.run([*torchrun, "benchmarks.checkpoints.torchtitan_neighbour", "--dir", str(folder)], check=True)
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
