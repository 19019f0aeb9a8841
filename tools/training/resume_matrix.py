"""Train on one mesh, reshard offline, resume on another; shared by the test (some pairs) and the campaign (all).

Each mesh's model is built once per pool; loading overwrites its whole state, so one model serves every source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.state_dict import as_bytes, detached_shard
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import Start, TrainingProgress, live_state, pipeline_record, restore, training_record
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.model.experts import BalanceConfig, ExpertsConfig
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import Optimizer, OptimizerConfig, build_optimizer, learning_rate
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.model import ModelSpec
from tools.rank_pool import RankPool
from tools.training.curves import SMALL

# Sizes not divisible by 4, so that shards are uneven.
MODEL = replace(SMALL, vocab_size=130, ffn_dim=98)
EXPERTS = ExpertsConfig(
    number=8, per_token=2, ffn_dim=28, scores="sigmoid", correction_bias=True, groups=2, shared=1, dense_layers=1
)
MIXTURE = replace(MODEL, family="qwen3_moe", qk_norm=True, experts=EXPERTS)
SPECS = {False: decoder(MODEL), True: decoder(MIXTURE)}
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=4)
BATCH, SEQ_LEN, SEED = 8, 24, 1
STEPS_BEFORE, STEPS_AFTER = 6, 10
MEMORY = 16 << 20
_FINGERPRINT = "random tokens by position"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Losses of the steps after a load, and a digest of this rank's loaded state."""

    losses: list[float]
    start: TrainingProgress
    digest: str


@dataclass(slots=True, kw_only=True)
class _Job:
    spec: ModelSpec
    parallelized: Parallelized
    optimizer: Optimizer
    control: ControlGroup

    def steps(self, progress: TrainingProgress, count: int) -> tuple[list[float], TrainingProgress]:
        """Train `count` steps from `progress`, which determines the data and the learning rate."""
        losses = []
        for _ in range(count):
            losses.append(self._step(progress))
            progress = progress.after(samples=BATCH, tokens=BATCH * SEQ_LEN)
        return losses, progress

    def _step(self, progress: TrainingProgress) -> float:
        generator = torch.Generator().manual_seed(progress.samples)
        tokens = torch.randint(0, MODEL.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]  # learnable: every second token repeats the one before
        size = BATCH // self.parallelized.data_degree
        mine = tokens[self.parallelized.data_rank * size :][:size]
        loss = self.parallelized.forward_backward(
            {"tokens": mine[:, :-1], "labels": mine[:, 1:].clone()}, count=BATCH * SEQ_LEN
        )
        self.parallelized.clip_grad_norm(1.0)
        self.optimizer.step(learning_rate(OPTIMIZER, progress.step, STEPS_BEFORE + STEPS_AFTER))
        self.optimizer.zero_grad()
        return float(self.parallelized.reduce_loss(loss)) / (BATCH * SEQ_LEN)

    def digest(self) -> str:
        """A digest of this rank's state."""
        hasher = hashlib.sha256()
        for part in live_state(self.parallelized, self.optimizer).values():
            for fqn, tensor in sorted(part.items()):
                hasher.update(fqn.encode())
                hasher.update(as_bytes(detached_shard(tensor).contiguous()))
        return hasher.hexdigest()


_jobs: dict[tuple[ParallelConfig, bool], _Job] = {}


def _job(parallel: ParallelConfig, *, is_mixture: bool) -> _Job:
    """The model on this mesh, built once per process."""
    key = parallel, is_mixture
    if key not in _jobs:
        _jobs[key] = _new_job(parallel, is_mixture=is_mixture)
    return _jobs[key]


def _new_job(parallel: ParallelConfig, *, is_mixture: bool) -> _Job:
    mesh, spec = mesh_spec(parallel, torch.distributed.get_world_size()), SPECS[is_mixture]
    balance = BalanceConfig(bias_rate=0.01, balance_loss=0.01)
    parallelized = build_parallel_model(
        spec, parallel, mesh, device=torch.device("cpu"), seed=SEED, balance=balance if is_mixture else None
    )
    optimizer, control = build_optimizer(parallelized, OPTIMIZER), ControlGroup(timeout_s=60)
    return _Job(spec=spec, parallelized=parallelized, optimizer=optimizer, control=control)


def losses_without_stop(_rank: int, parallel: ParallelConfig, is_mixture: bool = False) -> list[float]:
    """Those of the steps after `STEPS_BEFORE`, with no save and no load before them."""
    job = _new_job(parallel, is_mixture=is_mixture)
    _, progress = job.steps(TrainingProgress(), STEPS_BEFORE)
    return job.steps(progress, STEPS_AFTER)[0]


def train_and_save(_rank: int, parallel: ParallelConfig, url: str, is_mixture: bool = False) -> None:
    """Train from scratch and save as the trainer does. Call it before any load on this mesh."""
    job = _job(parallel, is_mixture=is_mixture)
    _, progress = job.steps(TrainingProgress(), STEPS_BEFORE)
    mesh = job.parallelized.mesh
    rate = learning_rate(OPTIMIZER, progress.step, STEPS_BEFORE + STEPS_AFTER)
    save(
        url,
        live_state(job.parallelized, job.optimizer),
        step=progress.step,
        options=SaveOptions(mesh=mesh, pipeline=pipeline_record(plan_of(job.spec), parallel, mesh), timeout_s=60),
        training=training_record(progress, fingerprint=_FINGERPRINT, seed=SEED, lr=rate),
        config={"model": as_dict(job.spec.config)},
    )


def train_sources(
    pool: RankPool,
    meshes: Mapping[str, ParallelConfig],
    names: Iterable[str],
    folder: Path,
    *,
    is_mixture: bool = False,
) -> dict[str, str]:
    """Train and save on each of `names`, once. Returns the checkpoints' paths."""
    urls = {name: str(folder / name) for name in names}
    for name, url in urls.items():
        pool.run(train_and_save, meshes[name], url, is_mixture)
    return urls


def resume_both_ways(
    pool: RankPool, parallel: ParallelConfig, source: str, url: str, mesh: str, *, is_mixture: bool = False
) -> tuple[list[Resumed], list[Resumed]]:
    """Resume from `source` loaded online, and from `url`, to which it is resharded; by rank."""
    reshard(source, url, mesh)
    online: list[Resumed] = pool.run(resume, parallel, source, is_mixture)
    offline: list[Resumed] = pool.run(resume, parallel, url, is_mixture)
    return online, offline


def reshard(source: str, url: str, mesh: str) -> None:
    """Reshard offline, in this process."""
    run_plan(plan_reshard(open_checkpoint(source), MeshSpec.parse(mesh)), url, memory_bytes=MEMORY)


def resume(_rank: int, parallel: ParallelConfig, url: str, is_mixture: bool = False) -> Resumed:
    """Load `url` on this mesh and continue training."""
    job = _job(parallel, is_mixture=is_mixture)
    start = Start(checkpoint=open_checkpoint(url), is_own=True)
    progress = restore(
        start, job.parallelized, job.optimizer, control=job.control, fingerprint=_FINGERPRINT, other_data=False
    )
    digest = job.digest()
    losses, _ = job.steps(progress, STEPS_AFTER)
    return Resumed(losses=losses, start=progress, digest=digest)
