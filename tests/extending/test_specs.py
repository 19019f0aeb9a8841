"""Specs that do not fit their models, or meshes that a model cannot have, are refused by FQN."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer import Colwise, CrossEntropy, Head, ModelSpec, Region, Rowwise, Shared, Vocab
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits


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
