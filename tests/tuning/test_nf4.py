"""Adapters on a base in NF4: the losses of a plain loop with torchao's own product on every mesh; what cannot be is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training_runs import read_losses, train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError, LoadContractError, MissingExtraError
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, resolve_mesh
from titan_ckpt.trainer.job.changed_settings import check_settings
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.frozen_weights import load_base, nf4_targets
from titan_ckpt.trainer.job.resume import Start
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.linear import Nf4Linear, check_nf4, nf4_bytes
from titan_ckpt.trainer.model.lora import LoraConfig, adapters_of, add_adapters, start_adapters
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.initialize import fill, fill_initial
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.paths import DEBUG_CONFIG
from tools.rank_pool import RankPool

MODEL = ModelConfig(
    vocab_size=128, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=96, max_seq_len=512, qkv_bias=True
)
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), base="nf4")
STEPS, LR = 20, 0.02


class PlainLora(nn.Module):
    """A projection as one would write it with torchao and torch alone."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        from torchao.quantization import to_nf4

        super().__init__()
        scales = linear.weight.numel() // 64
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, min(scales & -scales, 256)), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.empty(LORA.rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, LORA.rank))
        with torch.no_grad():
            fill(self.a, f"{name}.lora_A.weight", decoder(MODEL), 1, MeshSpec(), {})

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + 2.0 * F.linear(F.linear(x, self.a), self.b)


def _tokens() -> Tensor:
    return torch.randint(MODEL.vocab_size, (8, 33), generator=torch.Generator().manual_seed(3))


def _base() -> nn.Module:
    """The model with weights large enough that four bits show in the losses."""
    spec = decoder(MODEL)
    model = spec.build()
    fill_initial(model, spec, 5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("base") / "run")
    save(url, {"model": {name: weight.detach() for name, weight in _base().named_parameters()}}, step=1)
    return url


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses of torch's AdamW on `PlainLora`."""
    model = _base()
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LORA.targets:
            model.set_submodule(name, PlainLora(module, name))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, losses = _tokens(), []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _curve(_rank: int, parallel: ParallelConfig, world_size: int, base: str, lora: LoraConfig = LORA) -> list[float]:
    """Losses of the trainer's parts on the base at this URL."""
    mesh = mesh_spec(parallel, world_size)
    built = build_parallel_model(
        decoder(MODEL), parallel, mesh, device=torch.device("cpu"), seed=1,
        extend=lambda part, plan, ranks: add_adapters(part, plan, lora, ranks),
    )  # fmt: skip
    start_adapters(built.named_parameters())
    load_base(base, Start(), built, ControlGroup(timeout_s=60.0))
    found = {name for targets in nf4_targets(built) for name in targets}
    assert bool(found) == (lora.base == "nf4")
    assert not {f"{name}.weight" for name in found} & set(built.model_state())
    optimizer = build_optimizer(built, OptimizerConfig(lr=LR), only=adapters_of(built.named_parameters()))
    tokens, losses = _tokens(), []
    each = 8 // built.data_degree
    mine = tokens[built.data_rank * each : (built.data_rank + 1) * each]
    for _ in range(STEPS):
        local = built.forward_backward({"tokens": mine[:, :-1], "labels": mine[:, 1:]}, count=8 * 32)
        losses.append(float(built.reduce_loss(local)) / (8 * 32))
        built.clip_grad_norm(1.0)
        optimizer.step(LR)
        optimizer.zero_grad()
    return losses


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.getbasetemp() / "tokens")


@pytest.fixture(scope="module")
def one() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.dist
def test_one_process_has_the_losses_of_torchao_s_product(one: RankPool, base: str, plain: list[float]) -> None:
    curve = one.run(_curve, ParallelConfig(), 1, base)[0]
    assert curve == pytest.approx(plain, rel=1e-5)
    assert curve[-1] < curve[0] - 0.1
    exact = one.run(_curve, ParallelConfig(), 1, base, replace(LORA, base="float32"))[0]
    assert curve[0] != pytest.approx(exact[0], rel=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(activation_checkpoint="full"), ParallelConfig(activation_checkpoint="every_n"),
        ParallelConfig(activation_checkpoint="selective"), ParallelConfig(compile=True),
        ParallelConfig(compile=True, activation_checkpoint="full"),
        ParallelConfig(compile=True, activation_checkpoint="selective"),
    ],
    ids=str,
)  # fmt: skip
def test_recomputed_and_compiled_blocks_have_the_same_losses(
    parallel: ParallelConfig, one: RankPool, base: str, plain: list[float]
) -> None:
    curve = one.run(_curve, parallel, 1, base)[0]
    assert curve == pytest.approx(plain, rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp_shard=4), ParallelConfig(dp_replicate=2, dp_shard=2), ParallelConfig(cp=2, dp_shard=2),
        ParallelConfig(pp=2, dp_shard=2, microbatches=2), ParallelConfig(pp=2, cp=2, microbatches=2),
        ParallelConfig(pp=4, microbatches=4), ParallelConfig(pp=2, dp_shard=2, microbatches=2, compile=True),
        ParallelConfig(pp=2, dp_shard=2, microbatches=4, pp_schedule="Interleaved1F1B"),
        ParallelConfig(pp=2, dp_shard=2, microbatches=4, pp_schedule="ZBVZeroBubble"),
    ],
    ids=str,
)  # fmt: skip
def test_every_mesh_has_the_losses_of_one_plain_process(
    parallel: ParallelConfig, four: RankPool, base: str, plain: list[float]
) -> None:
    assert four.run(_curve, parallel, 4, base)[0] == pytest.approx(plain, rel=1e-5)


NF4 = ("lora.rank=4", 'lora.base="nf4"', "resume.from=base")


def _resolved(world_size: int, *sets: str) -> None:
    config = resolve(TrainConfig, DEBUG_CONFIG, (*NF4, *sets)).config
    check_config(config)
    resolve_mesh(config, world_size)


@pytest.mark.parametrize(
    ("world_size", "setting", "words"),
    [
        (2, "mesh.tp=2", "with tp=2: the scales of a weight share one mean"),
        (1, "mesh.float8=rowwise", "with float8=rowwise: decoded weights"),
        (1, "mesh.cpu_offload=true", "with cpu_offload: FSDP does not know"),
        (1, "model.head_dim=6", r"self_attn\.q_proj\.weight has 24 x 36 values, not a multiple of the 64"),
        (1, "lora.base=int4", "float32.*nf4"),
        (1, "lora.rank=0", "lora.rank = 0 trains the whole model"),
    ],
)
def test_what_cannot_be_in_nf4_is_refused_before_a_rank_starts(world_size: int, setting: str, words: str) -> None:
    _resolved(world_size)
    sets = (setting, "model.dim=36") if "head_dim" in setting else (setting,)
    with pytest.raises(ConfigError, match=words):
        _resolved(world_size, *sets)


def test_a_projection_with_a_forward_of_its_own_is_refused() -> None:
    class Odd(nn.Linear):
        pass

    with pytest.raises(ConfigError, match="a is a Odd, whose forward would be replaced"):
        check_nf4("a", Odd(64, 64))


def test_torchao_is_asked_for_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"needs torchao, .*titan-ckpt\[train\]"):
        _resolved(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_has_no_codes_is_named(value: float) -> None:
    weight = torch.randn(64, 64)
    weight[3, 4] = value
    with pytest.raises(LoadContractError, match=r"a\.weight: holds an infinity or NaN"):
        Nf4Linear(nn.Linear(64, 64)).quantise(weight, "a.weight")


def test_the_bytes_of_a_weight_are_those_of_torchao_s_tensors() -> None:
    from torchao.quantization import to_nf4

    for shape, scales in (((64, 64), 64), ((576, 576), 64), ((256, 512), 256)):
        codes = to_nf4(torch.randn(shape), 64, scales)
        parts = (codes.quantized_data, codes.quantized_scalers, codes.quantization_factor)
        assert nf4_bytes(codes.numel()) == sum(part.nbytes for part in parts)


def _num_values(folder: Path) -> int:
    """Of the model and its adapters of rank 4 in two layers of the debug model."""
    weights = [t for t in open_checkpoint(str(folder)).manifest.tensors if t.fqn.startswith("model.")]
    whole = {t.fqn: math.prod(t.global_shape) for t in weights}
    adapters = sum(
        4 * sum(t.global_shape) for t in weights if t.fqn.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    return sum(whole.values()) + adapters


def test_a_frozen_glob_may_name_weights_that_are_in_nf4(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path / "base", "train.steps=1") == 0
    sets = (*NF4, f"resume.from={tmp_path}/base", 'train.freeze=["*q_proj.weight"]', "train.steps=1")
    assert train(cache, tmp_path / "run", *sets) == 0


def _losses(folder: Path) -> list[float]:
    return list(read_losses(folder).values())


def test_a_run_goes_on_exactly_and_only_on_the_same_base(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = (*NF4, f"resume.from={tmp_path}/base", "optimizer.lr=0.02", "save.every=2")
    assert train(cache, tmp_path / "base", "train.steps=2") == 0
    assert train(cache, tmp_path / "whole", *sets, "train.steps=6") == 0
    assert train(cache, tmp_path / "halves", *sets, "train.steps=6", "train.max_seconds=0.0001") == 0
    assert len(_losses(tmp_path / "halves")) == 1
    assert train(cache, tmp_path / "halves", *sets, "train.steps=6", 'lora.base="float32"') == 2
    assert "lora.base: nf4 -> float32" in capsys.readouterr().err
    assert train(cache, tmp_path / "halves", *sets, "train.steps=6") == 0
    assert _losses(tmp_path / "halves") == _losses(tmp_path / "whole")
    said = (tmp_path / "halves" / "logs" / "rank_00000.log").read_text()
    assert "8 are kept in NF4" in said
    assert "weights (those of q_proj, k_proj, v_proj, o_proj nf4) and moments float32" in said
    assert f"model: {_num_values(tmp_path / 'base') / 1e6:.2f} M parameters" in said
    assert train(cache, tmp_path / "float", *sets, 'lora.base="float32"', "train.steps=6") == 0
    assert _losses(tmp_path / "float") != _losses(tmp_path / "whole")
    assert all(
        ".lora_" in name for name in open_checkpoint(str(tmp_path / "whole")).manifest.by_fqn if "model." in name
    )


def test_adapters_of_before_the_setting_are_not_taken_to_nf4(tmp_path: Path) -> None:
    before = {"lora": {"rank": 4, "alpha": 16.0, "targets": ["q_proj"]}}
    save(str(tmp_path / "run"), {"n": 1}, step=1, config=before)
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    check_settings(checkpoint, {"lora": {**before["lora"], "base": "float32"}}, is_own=True)
    with pytest.raises(ConfigError, match=r"lora\.base: float32 -> nf4"):
        check_settings(checkpoint, {"lora": {**before["lora"], "base": "nf4"}}, is_own=True)


def test_a_merge_into_the_weights_before_nf4_is_said(
    tmp_path: Path, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    sets = (*NF4, f"resume.from={tmp_path}/base", "optimizer.lr=0.02", "train.steps=2")
    assert train(cache, tmp_path / "base", "train.steps=1") == 0
    assert train(cache, tmp_path / "run", *sets) == 0
    assert main(["train", f"{tmp_path}/run", "--export-adapter", f"{tmp_path}/adapter"]) == 0
    merging = ["--merge-lora", f"{tmp_path}/adapter", "--dtype", "float32"]
    assert main(["convert", "to-hf", f"{tmp_path}/base", f"{tmp_path}/hf", *merging]) == 0
    assert "was trained on weights in 'nf4', and is merged into the weights" in caplog.text
    name = "model.layers.0.self_attn.q_proj"
    run, base = open_checkpoint(str(tmp_path / "run")), open_checkpoint(str(tmp_path / "base"))
    a, b = (run.read(f"model.{name}.lora_{side}.weight") for side in "AB")
    expected = base.read(f"model.{name}.weight") + 4.0 * b @ a
    assert torch.allclose(open_checkpoint(f"{tmp_path}/hf").read(f"model.{name}.weight"), expected, atol=1e-6)
    assert main(["eval", f"{tmp_path}/run", "--set", "validation.fraction=0.1"]) == 0
