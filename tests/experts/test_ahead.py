"""Multi-token prediction: its labels, its loss, and its gradients on meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from titan_ckpt.errors import ConfigError
from titan_ckpt.resharding.placement_rules import tensor_parallel
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.trainer.model.ahead import AHEAD_LABELS, AHEAD_TOKENS, AheadConfig, ahead_fields
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig, decoder
from titan_ckpt.trainer.model.rope import rotation
from titan_ckpt.trainer.seams.loss import IGNORED
from tools.rank_pool import RankPool
from tools.training.curves import BALANCING, DEEPSEEK, SMALL, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh

TWO = replace(DEEPSEEK, ahead=AheadConfig(depth=2, weight=0.4))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def model(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    built = Decoder(config)
    for fqn, weight in built.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in fqn), std=0.1)
    for buffer in list(built.buffers()):
        buffer.zero_()
    return built


def test_tokens_and_labels_are_those_of_later_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(1, 50, (2, 2, 9), generator=generator)
    labels[0, 4] = IGNORED
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0] * 9])
    found = ahead_fields({"tokens": tokens, "labels": labels, "documents": documents}, 2)
    for b in range(2):
        for i in range(9):
            for k in (1, 2):
                is_there = i + k < 9 and documents[b, i + k] == documents[b, i]
                assert found[AHEAD_LABELS][b, i, k - 1] == (labels[b, i + k] if is_there else IGNORED)
                if is_there:
                    assert found[AHEAD_TOKENS][b, i, k - 1] == tokens[b, i + k]
    assert ahead_fields({"tokens": tokens}, 2) == {}


def test_later_tokens_add_to_the_gradient_alone() -> None:
    whole, plain = model(TWO), model(replace(TWO, ahead=None))
    plain.load_state_dict({n: w for n, w in whole.state_dict().items() if not n.startswith("model.ahead")})
    tokens = torch.randint(0, TWO.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    x, labels = tokens[:, :-1], tokens[:, 1:]
    more = ahead_fields({"tokens": x, "labels": labels}, 2)
    loss = whole(x, labels, **more)
    torch.testing.assert_close(loss, plain(x, labels))
    loss.backward()
    found = {name: weight.grad for name, weight in whole.named_parameters()}
    whole.zero_grad()

    h = whole.model(x, torch.arange(12)[None], None)  # the definition, one position after the other
    total = whole.lm_head(h, labels)
    turn = rotation(whole.model.rope, torch.arange(12)[None])
    for k, module in enumerate(whole.model.ahead.depths.values(), start=1):
        embedded = torch.zeros_like(h)
        embedded[:, : 12 - k] = whole.model.embed_tokens(x[:, k:])
        embedded[:, 12 - k :] = whole.model.embed_tokens(torch.zeros(2, k, dtype=torch.int64))
        joined = torch.cat([module.enorm(embedded), module.hnorm(h)], dim=-1) @ module.eh_proj.weight.T
        h = module.norm(module.layer(joined, turn, None))
        for i in range(12 - k):
            total = total + 0.2 * whole.lm_head(h[:, i : i + 1], labels[:, i + k : i + k + 1])
    total.backward()
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        mesh(ep=2),
        mesh(ep=2, tp=2),
        mesh(tp=2, cp=2),
        mesh(pp=2, ep=2),
        mesh(ep=2, cp=2, activation_checkpoint="full"),
    ],
    ids=str,
)
def test_on_meshes_it_is_that_of_one_process(ranks: RankPool, parallel: Any) -> None:
    run = CurveCase(model=TWO, balance=BALANCING, parallel=parallel, steps=4)
    found, expected = ranks.run(train, run)[0], single(replace(run, parallel=mesh()))
    assert relative_error(found.losses, expected.losses) <= 1e-5
    assert relative_error(found.norms, expected.norms) <= 1e-4
    assert found.loads == expected.loads
    assert relative_error(expected.losses, single(replace(run, model=DEEPSEEK, parallel=mesh())).losses) > 1e-4


@pytest.mark.dist
def test_embedding_and_head_share_one_weight_on_the_last_stage(ranks: RankPool) -> None:
    run = CurveCase(model=replace(TWO, tied_embeddings=True), parallel=mesh(pp=2), steps=3)
    found, expected = ranks.run(train, run)[0], single(replace(run, parallel=mesh()))
    assert relative_error(found.losses, expected.losses) <= 1e-5
    assert relative_error(found.norms, expected.norms) <= 1e-4


def test_a_reshard_knows_how_tp_cuts_the_modules() -> None:
    depth = "model.model.ahead.depths.0"
    assert tensor_parallel(f"{depth}.eh_proj.weight") == tensor_parallel(f"{depth}.enorm.weight") == {}
    assert tensor_parallel(f"{depth}.layer.self_attn.o_proj.weight") == {"tp": Shard(1)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SMALL, ahead=AheadConfig()), "family llama predicts no more than the next token"),
        (replace(DEEPSEEK, ahead=AheadConfig(depth=0)), r"model\.ahead\.depth = 0: must be from 1 to 16"),
        (replace(DEEPSEEK, ahead=AheadConfig(weight=0.0)), r"model\.ahead\.weight = 0\.0: must be more than 0"),
    ],
)
def test_what_it_cannot_be_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(config)
