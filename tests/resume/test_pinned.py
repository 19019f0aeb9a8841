"""What a run computes from its seed and gradients, pinned: a change here changes every run that is started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import xxhash

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import init_rank_mesh
from titan_ckpt.trainer.model import loss
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.model.lora import adapters_of
from titan_ckpt.trainer.parallel.config import ParallelConfig
from titan_ckpt.trainer.parallel.initialize import _GOLDEN, _key, _mix
from titan_ckpt.trainer.parallel.optimizer import NoGradientError, OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams import loss as seams_loss
from tools.training.curves import SMALL

CPU = torch.device("cpu")
# Digest of the first 4,096 counters' bits: integers, the same on every processor.
BITS = {
    (0, "model.embed_tokens.weight"): "692e92f8fded9a0c",
    (0, "lm_head.weight"): "a460cb6161980cfe",
    (1, "model.embed_tokens.weight"): "c5b981ef2a349518",
    (1, "lm_head.weight"): "fbf117879dbdb21d",
    (2**31 - 1, "model.embed_tokens.weight"): "aa104ff445071109",
    (2**31 - 1, "lm_head.weight"): "1114a97085bbb9c7",
}
# First and last element and standard deviation of seed 3. Logarithm and cosine may differ in the last bit between processors.
WEIGHTS = {
    "model.embed_tokens.weight": (0.0175895, -0.0069013, 0.020046),
    "model.layers.1.input_layernorm.weight": (1.0, 1.0, 0.0),
    "model.layers.1.self_attn.q_proj.weight": (0.0051784, -0.0028959, 0.019660),
    "model.layers.1.self_attn.k_proj.weight": (-0.0180784, -0.0124230, 0.020286),
    "model.layers.1.self_attn.v_proj.weight": (-0.0009303, -0.0025402, 0.019545),
    "model.layers.1.self_attn.o_proj.weight": (0.0041013, -0.0039715, 0.007014),
    "model.layers.1.post_attention_layernorm.weight": (1.0, 1.0, 0.0),
    "model.layers.1.mlp.gate_proj.weight": (0.0324082, -0.0065693, 0.020196),
    "model.layers.1.mlp.up_proj.weight": (-0.0013818, 0.0097144, 0.019996),
    "model.layers.1.mlp.down_proj.weight": (0.0002466, 0.0066964, 0.007042),
    "model.norm.weight": (1.0, 1.0, 0.0),
    "lm_head.weight": (-0.0028279, -0.0197313, 0.020018),
}


@pytest.fixture
def model() -> Iterator[Parallelized]:
    """A small model on one rank."""
    yield build_parallel_model(decoder(SMALL), ParallelConfig(), MeshSpec(), device=CPU, seed=3)
    dist.destroy_process_group()


def test_the_random_bits_of_a_seed() -> None:
    found = {}
    for seed, fqn in BITS:
        bits = _mix(torch.arange(4096) * _GOLDEN + _key(seed, fqn))
        found[seed, fqn] = xxhash.xxh3_64_hexdigest(bits.numpy().tobytes())
    assert found == BITS


def test_the_initial_weights_of_a_seed(model: Parallelized) -> None:
    weights = model.named_parameters()
    assert {name.replace(".0.", ".1.") for name in weights if ".2." not in name and ".3." not in name} == set(WEIGHTS)
    for name, expected in WEIGHTS.items():
        flat = weights[name].detach().flatten()
        assert (flat[0].item(), flat[-1].item(), flat.std().item()) == pytest.approx(expected, abs=1e-6), name


def test_a_weight_without_a_gradient_is_named(model: Parallelized) -> None:
    optimizer, weights = build_optimizer(model, OptimizerConfig()), model.named_parameters()
    tokens = torch.arange(32).view(2, 16)
    model.forward_backward({"tokens": tokens, "labels": tokens.roll(-1, 1)}, count=32)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    weights["model.layers.2.mlp.up_proj.weight"].grad = None
    with pytest.raises(NoGradientError, match=r"no gradient has reached model\.layers\.2\.mlp\.up_proj\.weight, so"):
        optimizer.step(1e-2)
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    weights["model.layers.2.mlp.up_proj.weight"].requires_grad_(False)  # left out on purpose
    optimizer.step(1e-2)
    assert {name for name, weight in weights.items() if torch.equal(weight, before[name])} == {
        "model.layers.2.mlp.up_proj.weight"
    }


def test_the_label_of_masked_tokens_has_one_definition() -> None:
    assert loss.IGNORED is seams_loss.IGNORED
    assert torch.nn.CrossEntropyLoss().ignore_index == loss.IGNORED


def test_the_names_of_adapters() -> None:
    names = ["a.q_proj.weight", "a.q_proj.lora_A.weight", "a.q_proj.lora_B.weight", "lora_A", "a.lora_Ax.weight"]
    assert adapters_of(names) == names[1:3]
    assert adapters_of(names[:1]) == []


@pytest.mark.parametrize(("mesh", "has_group"), [("cp=2", True), ("dp_shard=2", False), ("cp=4", True)])
def test_a_context_group_from_two_ranks_on(mesh: str, has_group: bool) -> None:
    spec = MeshSpec.parse(mesh)
    dist.init_process_group("fake", rank=0, world_size=spec.world_size)
    try:
        ranks = init_rank_mesh(spec, CPU)
        assert (ranks.cp_group is not None) == has_group
        assert ranks.cp_group is None or ranks.cp_group.size() == spec.world_size
    finally:
        dist.destroy_process_group()
