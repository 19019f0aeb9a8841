"""Models from outside: the examples equal plain PyTorch on every mesh, and resume; specs that cannot be are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import gpt2
from tests.support.training_runs import read_losses
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer import Colwise, CrossEntropy, Head, ModelSpec, Region, Rowwise, Shared, Vocab, fill_initial
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.paths import EXAMPLES
from tools.rank_pool import RankPool
from tools.training.mesh_cases import mesh

STEPS, BATCH, SEQ_LEN = 20, 8, 16
GPT2 = gpt2.Gpt2Config(vocab_size=64, dim=32, n_layers=4, n_heads=4, max_seq_len=64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _tokens(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step % 2))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def _plain(spec: ModelSpec, batches: Any) -> list[float]:
    """The losses of plain PyTorch code: one process, one model, torch's AdamW."""
    model = spec.build()
    fill_initial(model, spec, seed=1)
    weights = dict(model.named_parameters()).values()
    groups = [{"params": [w for w in weights if w.ndim > 1]}, {"params": [w for w in weights if w.ndim == 1]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        x, *others = batches(step).values()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), others[0].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _parallel(_rank: int, spec_of: Any, argument: Any, parallel: ParallelConfig, batches: Any) -> list[float]:
    spec = spec_of(argument)
    placed = mesh_spec(parallel, 4)
    model = build_parallel_model(spec, parallel, placed, device=torch.device("cpu"), seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=3e-3))
    size, losses = BATCH // model.data_degree, []
    for step in range(STEPS):
        mine = {name: value[model.data_rank * size :][:size] for name, value in batches(step).items()}
        count = batches(step)["labels"].numel()
        loss = model.forward_backward(mine, count=count)
        losses.append(float(model.reduce_loss(loss)) / count)
        model.clip_grad_norm(1.0)
        optimizer.step(3e-3)
        optimizer.zero_grad()
    return losses


def _assert_alike(ranks: RankPool, spec_of: Any, argument: Any, batches: Any, meshes: list[ParallelConfig]) -> None:
    plain = _plain(spec_of(argument), batches)
    assert plain[-1] < plain[0]
    for parallel in meshes:
        assert ranks.run(_parallel, spec_of, argument, parallel, batches)[0] == pytest.approx(plain, rel=1e-5), parallel


@pytest.mark.dist
def test_gpt2_on_every_mesh_equals_plain_pytorch(ranks: RankPool) -> None:
    meshes = [
        mesh(dp_shard=2, tp=2), mesh(dp_shard=2, tp=2, sequence_parallel=False), mesh(pp=2, dp_shard=2),
        mesh(cp=2, dp_shard=2), mesh(pp=2, tp=2),
    ]  # fmt: skip
    _assert_alike(ranks, gpt2.model, GPT2, _tokens, meshes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_trains_from_the_command_line_and_goes_on(tmp_path: Path, cache: str) -> None:
    sets = (f"data.cache={cache}", f"save.url={tmp_path}/run", "log.tensorboard=false", "train.device=cpu")
    more = [part for text in sets for part in ("--set", text)]
    command = ["train", str(EXAMPLES / "gpt2.toml"), "--module", str(EXAMPLES / "gpt2.py"), *more]
    assert main([*command, "--set", "train.steps=2"]) == 0
    assert main([*command, "--set", "train.steps=3"]) == 0
    assert sorted(read_losses(tmp_path / "run")) == [1, 2, 3]
    assert main([*command, "--set", "train.steps=4", "--set", "model.n_heads=2"]) == 2  # same shapes, another model


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.n_head=2", "unknown key model.n_head; did you mean model.n_heads?"),
        ("mesh.pp=5", "4 layers over 5 stages leaves a stage without a layer"),
        ("mesh.tp=3", "embed.wte.weight: vocab_size 320 / tp 3 = 106.67: must be whole"),
        ("export.every=1", "has no Hugging Face layout"),
    ],
)
def test_a_config_of_an_own_model_is_checked_as_strictly(
    key: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(EXAMPLES / "gpt2.toml"), "--module", str(EXAMPLES / "gpt2.py"), "--set", key]
    more = ["--set", "mesh.dp_shard=1", "--set", f"save.url={tmp_path}", "--set", "save.every=1", "--nproc", key[-1]]
    assert main([*command, *more]) == 2
    assert message in capsys.readouterr().err


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        out: torch.Tensor = self.head(h)
        return out


TINY = ModelSpec(
    name="tiny", build=_Tiny, inputs=("tokens", "labels"), blocks="blocks.*", first=("embed",), last=("head",),
    tensor={
        "embed": Vocab(), "blocks.*": Region(), "blocks.*.0": Shared(), "blocks.*.1": Colwise(), "head": Head(),
    },
)  # fmt: skip


class _Normed(_Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


class _Turned(_Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(3), persistent=False)


class _Tied(_Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": "layers.*"}, r"tiny: blocks: 'layers.\*' matches no module; some are embed"),
        ({"blocks": "blocks.**"}, r"which lies inside another block"),
        ({"first": ("embedding",)}, r"tiny: first: 'embedding' matches no module"),
        ({"last": ("embed", "head")}, r"tiny: embed is in first and in last"),
        ({"tensor": {"embed": Colwise()}}, r"embed is a Embedding; Colwise divides Linear alone"),
        ({"tensor": {"head": Head(), "hea*": Shared()}}, r"tiny: head has two rules"),
        ({"build": _Normed}, r"norm.num_batches_tracked is a persistent buffer"),
        ({"build": _Turned}, r"angles is a buffer, .* give ModelSpec.fill_buffers"),
        ({"build": _Tied}, r"head.weight is the same weight as embed.weight; say so in tied"),
        ({"tied": {"head.weight": "embed.weight"}}, r"head.weight and embed.weight are two weights"),
        ({"tied": {"head.weigth": "embed.weight"}}, r"tied: no weight is called head.weigth"),
        ({"attention": "blocks.*"}, r"blocks.0 .ModelSpec.attention. has no attribute `attend`"),
        ({"build": lambda: nn.Linear(2, 2).weight}, r"build returned Parameter, expected an nn.Module"),
    ],
)
def test_a_spec_that_does_not_fit_its_model_names_the_module(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(dataclasses.replace(TINY, **change))


RULES = dict(TINY.tensor)


@pytest.mark.parametrize(
    ("change", "mesh_text", "message"),
    [
        ({"tensor": {}}, "tp=2", r"tiny: ModelSpec.tensor is empty, so tp=2"),
        ({"tensor": {n: r for n, r in RULES.items() if n != "head"}}, "tp=2", r"tiny: head.weight has no rule"),
        ({}, "tp=4", r"blocks.0.1.weight: outputs 6 / tp 4 = 1.50: must be whole"),
        ({"tensor": RULES | {"head": Colwise()}}, "tp=2", r"tiny: head: Colwise belongs in a Region"),
        ({"tensor": RULES | {"blocks.*.1": Head()}}, "tp=2", r"tiny: blocks.0.1: Head belongs outside a Region"),
        ({"tensor": RULES | {"blocks.*.1": Rowwise(unit=4)}}, "tp=2", r"dimension 1 of 6 is not a multiple of .* unit 4"),
        ({"first": ()}, "pp=2", r"tiny: embed.weight is in no block and not in first or last"),
        ({"build": _Tied, "first": ("head",), "last": ("embed",), "tied": {"head.weight": "embed.weight"}}, "pp=2",
         r"with pp only a last to a first module"),
        ({}, "cp=2", r"tiny: ModelSpec.attention is empty"),
    ],
)  # fmt: skip
def test_a_mesh_that_a_model_cannot_have_is_refused(change: dict[str, Any], mesh_text: str, message: str) -> None:
    placed = MeshSpec.parse(mesh_text)
    parallel = ParallelConfig(pp=placed.degree("pp"), cp=placed.degree("cp"), tp=placed.degree("tp"))
    with pytest.raises(ConfigError, match=message):
        check_fits(dataclasses.replace(TINY, **change), parallel, placed, seq_len=16, microbatch_size=8)


def test_cross_entropy_counts_the_labels_that_are_not_masked() -> None:
    labels = torch.tensor([[1, -100, 2]])
    assert CrossEntropy().count({"labels": labels}) == 2
    loss = CrossEntropy()(torch.zeros(1, 3, 4), {"labels": labels})
    assert loss.item() == pytest.approx(2 * torch.tensor(4.0).log().item())
