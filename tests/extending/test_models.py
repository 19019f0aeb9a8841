"""Models from outside: the examples equal plain PyTorch on every mesh, resume, and have configs checked as strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import diffusion, gpt2, vit
from tests.extending.odd_model import odd
from tests.support.training_runs import read_losses
from titan_ckpt.cli.main import main
from titan_ckpt.trainer import ModelSpec, fill_initial
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.data import collate
from tools.paths import EXAMPLES
from tools.rank_pool import RankPool
from tools.training.mesh_cases import mesh

STEPS, BATCH, SEQ_LEN = 6, 8, 16
VIT = vit.VitConfig(image_size=8, patch_size=4, dim=32)
DIT = diffusion.DitConfig(num_patches=6, patch_numbers=8, dim=32)
GPT2 = gpt2.Gpt2Config(vocab_size=64, dim=32, n_layers=4, n_heads=4, max_seq_len=64)


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
        batch = batches(step)
        first, *others = (name for name in spec.inputs if name in batch and name != "labels")
        output = model(batch[first], **{name: batch[name] for name in others})
        if isinstance(spec.loss, diffusion.SquaredError):
            loss = nn.functional.mse_loss(output, batch["noise"])
        else:
            loss = nn.functional.cross_entropy(output.flatten(0, -2), batch["labels"].flatten())
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
        count = spec.loss.count(batches(step))
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
    meshes = [mesh(dp_shard=2, tp=2), mesh(pp=2, dp_shard=2), mesh(cp=2, dp_shard=2)]
    _assert_alike(ranks, gpt2.model, GPT2, _tokens, meshes)


def _images(step: int) -> dict[str, torch.Tensor]:
    source = vit.Images(VIT, num_samples=64)
    return collate([source.sample(BATCH * (step % 2) + i) for i in range(BATCH)])


@pytest.mark.dist
def test_a_vision_transformer_equals_plain_pytorch(ranks: RankPool) -> None:
    meshes = [mesh(dp_shard=2, tp=2), mesh(pp=2, dp_shard=2)]
    _assert_alike(ranks, vit.model, VIT, _images, meshes)


def _waves(step: int) -> dict[str, torch.Tensor]:
    source = diffusion.Waves(DIT, num_samples=64)
    return collate([source.sample(BATCH * (step % 2) + i) for i in range(BATCH)])


@pytest.mark.dist
def test_a_diffusion_transformer_equals_plain_pytorch(ranks: RankPool) -> None:
    meshes = [mesh(dp_shard=2, tp=2), mesh(pp=2, dp_shard=2)]
    _assert_alike(ranks, diffusion.model, DIT, _waves, meshes)


@pytest.mark.dist
def test_the_other_rules_equal_plain_pytorch(ranks: RankPool) -> None:
    meshes = [mesh(dp_shard=2, tp=2, sequence_parallel=False), mesh(pp=2, tp=2)]
    _assert_alike(ranks, odd, 32, _tokens, meshes)


@pytest.mark.dist
@pytest.mark.hf
def test_the_code_of_transformers_equals_plain_pytorch(ranks: RankPool) -> None:
    from examples import transformers_llama  # imports transformers

    shape = transformers_llama.LlamaShape(vocab_size=64, dim=32)
    meshes = [mesh(pp=2, dp_shard=2), mesh(cp=2, tp=2)]
    _assert_alike(ranks, transformers_llama.model, shape, _tokens, meshes)


def test_a_module_trains_from_the_command_line_and_goes_on(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = (f"data.cache={cache}", f"save.url={tmp_path}/run", "log.tensorboard=false", "train.device=cpu")
    more = [part for text in sets for part in ("--set", text)]
    command = ["train", str(EXAMPLES / "gpt2.toml"), "--module", str(EXAMPLES / "gpt2.py"), *more]
    assert main([*command, "--set", "train.steps=2"]) == 0
    assert main([*command, "--set", "train.steps=3"]) == 0
    assert sorted(read_losses(tmp_path / "run")) == [1, 2, 3]
    assert main([*command, "--set", "train.steps=4", "--set", "model.n_heads=2"]) == 2  # same shapes, another model
    capsys.readouterr()
    assert main(["eval", f"{tmp_path}/run"]) == 2
    assert "if --module gave the run its model, give that here, too" in capsys.readouterr().err
    assert main(["convert", "to-hf", f"{tmp_path}/run", f"{tmp_path}/hf"]) != 0
    assert "it is not the trainer's own decoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.n_head=2", "unknown key model.n_head; did you mean 'model.n_heads'?"),
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
