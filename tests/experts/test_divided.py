"""Experts that the ranks of tp divide (`mesh.etp`): gradients, checkpoints, conversion, a user's experts, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf
from titan_ckpt.errors import ConfigError
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.trainer.config.toml_records import as_dict, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.launch.estimate import TrainingEstimate, estimate_training
from titan_ckpt.trainer.model.by_expert import looped_product
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.experts import Beside
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.experts import ToAll, paired
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.model import ModelSpec, Whole
from tools.paths import CONFIGS
from tools.rank_pool import RankPool
from tools.training.curves import DEEPSEEK, GPT_OSS, MIXTURE, SMALL, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh
from tools.training.resume_matrix import resume_both_ways, train_sources

DIVIDED = mesh(ep=2, tp=2, etp=2)
MESHES = {
    "ep=2,tp=2": DIVIDED,
    "dp_shard=2,tp=2": mesh(tp=2, etp=2),
    "dp_shard=2,ep=2": mesh(ep=2),
    "dp_replicate=2,tp=2": mesh(dp_replicate=2, tp=2),
}
PAIRS = [
    ("ep=2,tp=2", "dp_shard=2,ep=2"),
    ("ep=2,tp=2", "dp_replicate=2,tp=2"),
    ("dp_shard=2,tp=2", "ep=2,tp=2"),
    ("dp_shard=2,ep=2", "dp_shard=2,tp=2"),
]
EXPERTS = "model.model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def sources(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A trained checkpoint for every source mesh."""
    folder = tmp_path_factory.mktemp("sources")
    return train_sources(ranks, MESHES, (source for source, _ in PAIRS), folder, is_mixture=True)


class OwnExperts(nn.Module):
    """Experts as a user may write them: three matrices, and a bias that is added last."""

    def __init__(self, number: int, width: int, dim: int) -> None:
        super().__init__()
        self.number, self.exchange = number, None
        self.w1, self.w3 = (nn.Parameter(torch.empty(number, width, dim)) for _ in range(2))
        self.w2, self.bias = nn.Parameter(torch.empty(number, dim, width)), nn.Parameter(torch.empty(number, dim))
        self.divided: dict[str, int | None] = {"w1": 1, "w3": 1, "w2": 2, "bias": None}

    def forward(self, x_TD: Tensor, experts_TK: Tensor, beside: Beside) -> Tensor:
        order_N = experts_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(experts_TK.flatten(), minlength=self.number)
        rows_ND = x_TD[order_N // experts_TK.shape[1]]
        exchange: Any = self.exchange or (lambda compute, rows, counts, beside: (beside(), compute(rows, counts))[1])
        return torch.empty_like(rows_ND).index_copy(0, order_N, exchange(self.compute, rows_ND, counts_E, beside))

    def compute(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        gate_NF, up_NF = (looped_product(rows_ND, weight, counts_E) for weight in (self.w1, self.w3))
        y_ND = looped_product(gate_NF.sigmoid() * up_NF, self.w2, counts_E)
        return y_ND + self.bias.repeat_interleave(counts_E, dim=0)


def own_model(**changes: Any) -> ModelSpec:
    """`MIXTURE` with `OwnExperts`."""
    spec = decoder(replace(MIXTURE, n_layers=2))

    def build() -> nn.Module:
        model = spec.build()
        for layer in ("0", "1"):
            mixture: Any = model.get_submodule(f"model.layers.{layer}.mlp")
            mixture.experts = OwnExperts(8, 32, 64)
            mixture.experts.__dict__.update(changes)
        return model

    return replace(spec, build=build, initial=lambda fqn: spec.initial(fqn.replace("bias", "weight")))


OWN = "own"


def gradients(_rank: int, which: ModelConfig | str, parallel: ParallelConfig) -> dict[str, Tensor]:
    """The whole gradient of a batch after clipping, and the norm before."""
    spec = own_model() if isinstance(which, str) else decoder(which)
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = build_parallel_model(spec, parallel, mesh_spec(parallel, world), device=torch.device("cpu"), seed=3)
    tokens = torch.randint(0, 128, (8, 33), generator=torch.Generator().manual_seed(5))
    mine = tokens.chunk(model.data_degree)[model.data_rank]
    model.forward_backward({"tokens": mine[:, :-1], "labels": mine[:, 1:].clone()}, count=8 * 32)
    found = {"norm": model.clip_grad_norm(0.5)}
    for fqn, weight in model.named_parameters().items():
        assert weight.grad is not None
        found[fqn] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    return found


@pytest.mark.dist
@pytest.mark.parametrize("which", [MIXTURE, DEEPSEEK, GPT_OSS, OWN], ids=["mixture", "deepseek", "gpt_oss", "own"])
@pytest.mark.parametrize("parallel", [DIVIDED, mesh(tp=4, etp=4)], ids=["ep", "four"])
def test_gradients_of_divided_experts_are_those_of_one_process(
    ranks: RankPool, which: ModelConfig | str, parallel: ParallelConfig
) -> None:
    try:
        expected = gradients(0, which, mesh())
    finally:
        dist.destroy_process_group()
    for found in ranks.run(gradients, which, parallel):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error <= 1e-5, name


def thirds(rank: int) -> tuple[Tensor, Tensor]:
    """This rank's columns of 6 gates and 6 ups, paired, and what is sent to all and added up."""
    group = dist.group.WORLD
    assert group is not None
    both = torch.arange(24.0).view(2, 12)[:, 4 * rank : 4 * rank + 4]
    rows = torch.full((rank, 2), float(rank))  # other numbers of rows on each rank
    counts = torch.tensor([rank // 2, rank - rank // 2])
    sums = ToAll(group)(lambda x, sizes: x + float(sizes.sum()) + rank, rows, counts, lambda: None)
    return paired(both, group=group), sums


@pytest.mark.dist
def test_an_odd_number_of_ranks_pairs_gate_and_up() -> None:
    with RankPool(3) as pool:
        for rank, (pairs, sums) in enumerate(pool.run(thirds)):
            whole = torch.arange(24.0).view(2, 2, 6)
            assert torch.equal(pairs, whole[:, :, 2 * rank : 2 * rank + 2].flatten(1))
            assert torch.equal(sums, torch.full((rank, 2), 3.0 * rank + 3 * (0 + 1 + 2) + (0 + 1 + 2)))


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["bfloat16", "mxfp8"])
def test_divided_experts_multiply_in_narrow_dtypes(ranks: RankPool, dtype: Any) -> None:
    assert MIXTURE.experts is not None
    model = replace(MIXTURE, experts=replace(MIXTURE.experts, ffn_dim=64))
    run = CurveCase(model=model, parallel=replace(DIVIDED, experts_dtype=dtype), steps=3)
    bar = 2**-8 if dtype == "bfloat16" else 2**-6
    narrow = single(replace(run, parallel=mesh(experts_dtype=dtype)))
    assert relative_error(ranks.run(train, run)[0].losses, narrow.losses) <= bar


@pytest.mark.dist
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_divided_experts_reshard_as_an_online_load(
    ranks: RankPool, sources: dict[str, str], tmp_path: Path, source: str, target: str
) -> None:
    online, offline = resume_both_ways(ranks, MESHES[target], sources[source], str(tmp_path), target, is_mixture=True)
    assert offline == online


@pytest.mark.dist
def test_divided_experts_are_stored_once_in_whole_tensors(sources: dict[str, str]) -> None:
    manifest = open_checkpoint(sources["ep=2,tp=2"]).manifest
    rows, columns = manifest.by_fqn[EXPERTS + "gate_up_proj"], manifest.by_fqn[EXPERTS + "down_proj"]
    assert rows.placements == {"tp": Shard(1), "ep": Shard(0), "dp_shard": Shard(0)}
    assert columns.placements == {"tp": Shard(2), "ep": Shard(0), "dp_shard": Shard(0)}
    assert (rows.global_shape, columns.global_shape) == ((8, 56, 64), (8, 64, 28))
    assert (rows.num_chunks, columns.num_chunks) == (4, 4)


def save_weights(_rank: int, config: ModelConfig, parallel: ParallelConfig, url: str) -> None:
    """Save the initial weights, which are the same on every mesh."""
    spread = mesh_spec(parallel, dist.get_world_size() if dist.is_initialized() else 1)
    model = build_parallel_model(decoder(config), parallel, spread, device=torch.device("cpu"), seed=3)
    options = SaveOptions(mesh=spread, timeout_s=60)
    save(url, {"model": model.model_state()}, step=1, options=options, config={"model": as_dict(config)})


@pytest.mark.dist
@pytest.mark.parametrize("config", [MIXTURE, GPT_OSS], ids=lambda config: config.family)
def test_divided_experts_convert_to_the_same_files(ranks: RankPool, config: ModelConfig, tmp_path: Path) -> None:
    ranks.run(save_weights, config, DIVIDED, str(tmp_path / "divided"))
    try:
        save_weights(0, config, mesh(), str(tmp_path / "whole"))
    finally:
        dist.destroy_process_group()
    files = {}
    for name in ("divided", "whole"):
        export_hf(str(tmp_path / name), str(tmp_path / name / "hf"))
        files[name] = {path.name: path.read_bytes() for path in (tmp_path / name / "hf").iterdir()}
        assert b"exported" in files[name].pop("README.md")  # of which mesh
    assert "model.safetensors" in files["whole"]
    assert files["divided"] == files["whole"]


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"etp": 2}, MIXTURE, r"mesh.etp = 2 with tp = 1: must be 1"),
        ({"tp": 4, "etp": 2}, MIXTURE, r"mesh.etp = 2 with tp = 4: must be 1"),
        ({"tp": 2, "etp": 2}, SMALL, r"ModelSpec.experts is empty, so etp=2 has nothing to divide"),
        ({"tp": 2, "etp": 2, "sequence_parallel": False}, MIXTURE, r"mesh.etp = 2 without sequence_parallel"),
        ({"tp": 2, "etp": 2, "experts_dtype": "mxfp8"}, MIXTURE, r"down_proj: dimension 2 of 32 / 32 x etp 64 = 0.50"),
    ],
)
def test_an_etp_that_cannot_be_is_refused(options: dict[str, Any], model: ModelConfig, message: str) -> None:
    refuse(decoder(model), ParallelConfig(**options), message)


def test_a_width_that_tp_does_not_divide_is_refused() -> None:
    assert MIXTURE.experts is not None
    odd = decoder(replace(MIXTURE, experts=replace(MIXTURE.experts, ffn_dim=31)))
    refuse(odd, mesh(tp=2, etp=2), r"experts.down_proj: dimension 2 of 31 / etp 2 = 15.50")


@pytest.mark.parametrize(
    ("divided", "message"),
    [
        (None, r"layers.0.mlp.experts has no attribute `divided`"),
        ({"w1": 1, "w3": 1, "w2": 2}, r"experts.bias: the attribute `divided` is .* expected for each"),
        ({"w1": 0, "w3": 1, "w2": 2, "bias": None}, r"experts.w1: the attribute `divided`"),
        ({"w1": 1, "w3": 1, "w2": 2, "bias": None, "w4": 1}, r"experts.w4: the attribute `divided`"),
    ],
)
def test_experts_that_do_not_say_how_they_divide_are_refused(divided: Any, message: str) -> None:
    refuse(own_model(divided=divided), mesh(tp=2, etp=2), message)


def test_divided_experts_must_have_the_tokens_of_one_rank() -> None:
    spec = own_model()
    rules = {fqn: rule for fqn, rule in spec.tensor.items() if not fqn.endswith(".mlp.experts")}
    whole = replace(spec, tensor=rules | {"model.layers.*.mlp.experts": Whole()})
    refuse(whole, mesh(tp=2, etp=2), r"mesh.etp: ModelSpec.tensor has \[Whole\(\)\] for model.layers.0.mlp.experts")


def refuse(spec: ModelSpec, parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fits(spec, parallel, mesh_spec(parallel, parallel.tp), seq_len=48, microbatch_size=8)


def test_the_estimate_divides_experts_by_etp() -> None:
    def estimate(*sets: str) -> TrainingEstimate:
        config = resolve(TrainConfig, str(CONFIGS / "moe.toml"), sets).config
        return estimate_training(config, resolve_mesh(config, 4))

    divided, by_both = estimate("mesh.tp=4", "mesh.etp=4"), estimate("mesh.ep=2", "mesh.tp=2", "mesh.etp=2")
    assert divided.memory.parameters == by_both.memory.parameters == divided.num_parameters
    assert [t.name for t in divided.traffic if "experts" in t.name] == ["TP all-to-all of experts"]
    assert divided.memory.activations > estimate("mesh.tp=4").memory.activations  # the rows of all ranks of tp
