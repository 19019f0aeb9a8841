"""States, meshes and helpers of the tests that reshard whole checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.format.names import step_folder
from titan_ckpt.resharding.placement_rules import PlacementRule
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard

STEP = 7
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
MESHES = [
    "1", "dp_shard=2", "dp_shard=4", "dp_replicate=2,dp_shard=2", "tp=2", "dp_shard=2,tp=2", "cp=2", "dp_shard=3",
    "dp_shard=2,cp=2", "dp_shard=3,tp=2", "dp_shard=5", "dp_replicate=3,tp=2",
]  # fmt: skip
SMALL = 8 << 20


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits, so that NaNs with payloads are among the floats."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def llama(layers: int = 4, dim: int = 12) -> dict[str, Any]:
    """The state of a small Llama with Adam, as the trainer saves it."""
    generator = torch.Generator().manual_seed(1)
    model, states = {}, {}
    shapes = {
        "self_attn.q_proj.weight": (dim, dim), "self_attn.k_proj.weight": (5, dim), "self_attn.o_proj.weight": (dim, dim),
        "mlp.up_proj.weight": (31, dim), "mlp.down_proj.weight": (dim, 31), "input_layernorm.weight": (dim,),
    }  # fmt: skip
    named = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (65, dim), "model.norm.weight": (dim,), "lm_head.weight": (65, dim)}
    for fqn, shape in named.items():
        model[fqn] = torch.randn(shape, generator=generator)
        moments = {name: torch.randn(shape, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
        states[fqn] = moments | {"step": torch.tensor(3.0)}
    return {"model": model, "optimizer": {"state": states}, "rng": {"note": "a value that is no tensor"}}


def saved(url: str, state: dict[str, Any], **options: Any) -> Checkpoint:
    save(url, state, step=STEP, options=SaveOptions(mesh=MeshSpec(), **options), training={"step": STEP, "lr": 0.5})
    return open_checkpoint(url)


def resharded(checkpoint: Checkpoint, url: str, mesh: str, rules: tuple[PlacementRule, ...] = ()) -> Checkpoint:
    report = run_plan(plan_reshard(checkpoint, MeshSpec.parse(mesh), rules=rules), url, memory_bytes=SMALL)
    assert report.checkpoint is not None
    return report.checkpoint


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def emptied(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: emptied(v) if isinstance(v, dict) else torch.zeros_like(v) if isinstance(v, torch.Tensor) else None
        for name, v in tree.items()
    }


def assert_dcp_reads(url: str, state: dict[str, Any]) -> None:
    """Plain DCP with its stock reader finds exactly `state`."""
    found = emptied(state)
    dcp.load(found, checkpoint_id=f"{url}/{step_folder(STEP)}", no_dist=True)
    for (name, expected), (_, value) in zip(leaves(state), leaves(found), strict=True):
        same = bits(expected) == bits(value) if isinstance(expected, torch.Tensor) else expected == value
        assert same, name


def data_bytes(checkpoint: Checkpoint) -> dict[str, bytes]:
    files = checkpoint.manifest.files
    return {file.path.rpartition("/")[2]: checkpoint.store.read(checkpoint.path(file.path)) for file in files}


def random_rules(
    names: Iterable[str], shapes: dict[str, tuple[int, ...]], chance: random.Random
) -> tuple[PlacementRule, ...]:
    rules = []
    for name in names:
        axes = chance.sample(["tp", "dp_shard+cp", "dp_replicate"], chance.randint(0, 2)) if shapes[name] else []
        rules.append(PlacementRule(name, {axis: Shard(chance.randrange(len(shapes[name]))) for axis in axes}))
    return tuple(rules)
