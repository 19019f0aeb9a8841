"""`mesh.float8_skip`: projections that keep their dtype, by patterns of names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.parallel.precision import describe_precision
from tools.training.curves import SMALL

ROUND = replace(SMALL, n_layers=2)


@pytest.fixture
def group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def _check(model: Any = ROUND, **mesh: Any) -> None:
    check_fits(decoder(model), ParallelConfig(**mesh), MeshSpec(), seq_len=32, microbatch_size=1)


@pytest.mark.usefixtures("group")
def test_skipped_projections_keep_their_class() -> None:
    parallel = ParallelConfig(float8="tensorwise", float8_skip=("model.layers.0.**", "**.down_proj"))
    model = build_parallel_model(decoder(ROUND), parallel, MeshSpec(), device=torch.device("cpu"), seed=0)
    kinds = {
        fqn: type(module).__name__
        for fqn, module in model.parts[0].named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in fqn
    }
    plain = {fqn for fqn, kind in kinds.items() if kind == "Linear"}
    assert len(kinds) == 14
    assert plain == {fqn for fqn in kinds if ".layers.0." in fqn} | {"model.layers.1.mlp.down_proj"}
    assert set(kinds.values()) == {"Linear", "Float8Linear"}
    tokens = torch.arange(32).view(2, 16)
    assert torch.isfinite(model.forward_backward({"tokens": tokens, "labels": tokens}, count=32))
    assert "in the blocks but for model.layers.0.**, **.down_proj" in describe_precision(parallel, torch.device("cpu"))


def test_a_skipped_projection_may_have_any_size() -> None:
    odd = replace(ROUND, ffn_dim=100)
    with pytest.raises(ConfigError, match="gate_proj: outputs 100"):
        _check(odd, float8="rowwise")
    _check(odd, float8="rowwise", float8_skip=("**.mlp.*",))


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"float8_skip": ("**.k_proj",)}, 'mesh.float8_skip is set, but mesh.float8 = "none"'),
        (
            {"float8": "rowwise", "float8_skip": ("**.k_proj", "attention.wk")},
            r"'attention.wk' matches no projection of the blocks; one is called model.layers.0.self_attn.q_proj",
        ),
        ({"float8": "rowwise", "float8_skip": ("lm_head",)}, "'lm_head' matches no projection of the blocks"),
        ({"float8": "rowwise", "float8_skip": ("**",)}, "skips every projection"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(mesh: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _check(**mesh)
