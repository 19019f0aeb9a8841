"""The training state in a checkpoint beside its tensors, and how a run resumes from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from titan_ckpt.checkpoint import foreign_formats
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import ConfigError, DataError, LoadContractError, NotCommittedError, TitanError
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.saving.second_tier import open_nearest
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec, count_layers
from titan_ckpt.trainer.config.model_from import means_the_same
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.config.train_config import ResumeConfig
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.launch.compile_cache import ASSET as COMPILED
from titan_ckpt.trainer.launch.launch import is_first_attempt
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.experts import ExpertsConfig
from titan_ckpt.trainer.model.lora import adapters_of, check_whole
from titan_ckpt.trainer.model.plan import Plan
from titan_ckpt.trainer.parallel.config import ParallelConfig, num_stages, pipeline_style
from titan_ckpt.trainer.parallel.optimizer import AVERAGE, Optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.seams.model import ModelSpec

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
MODEL = "model"  # of the training record: what a spec has as `config`, if that is not the table [model]
AHEAD = "model.model.ahead."  # modules of the decoder
HOOKS = "hooks"  # the part of a checkpoint that hooks keep
NO_HOOKS: Mapping[str, Any] = MappingProxyType({})
_EXPERTS = as_dict(ExpertsConfig(number=1, per_token=1, ffn_dim=1))
_NEWER_KEYS = {"sinks": False, "full_attention_every": 0}  # of [model]: checkpoints of before do not have them
_OF_ANY_TOKENIZER = re.compile(r"config\.json|README\.md|(?i:LICEN[CS]E|NOTICE|USE_POLICY|COPYING|THIRD_PARTY).*")
TORCHTITAN = "tok_embeddings.weight"  # identifies checkpoints with torchtitan's names, whoever wrote the files


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """Optimizer steps finished, samples and tokens consumed; the same on every rank and mesh.

    `skipped` counts the steps without an update, whose gradient was not finite.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0

    def after(self, *, samples: int, tokens: int, is_skipped: bool = False) -> TrainingProgress:
        """The progress after one more step."""
        return TrainingProgress(
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped=self.skipped + is_skipped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts from; `checkpoint` None means from scratch. `is_own`: the checkpoint is of this run.

    `model_only`: load weights only, because of the config or because the checkpoint has nothing else.
    """

    checkpoint: Checkpoint | None = None
    is_own: bool = False
    model_only: bool = False


def training_record(
    progress: TrainingProgress,
    *,
    fingerprint: str,
    seed: int,
    lr: float,
    rule: str = "adamw",
    frozen: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The mesh-independent training state, as recorded in the manifest.

    `frozen` as of `frozen_record`, `model` as of `model_record`.
    """
    return {
        "step": progress.step,
        "tokens_seen": progress.tokens,
        "skipped_steps": progress.skipped,
        "lr": lr,
        "optimizer": rule,
        "data": {"position": progress.samples, "fingerprint": fingerprint},
        "rng": {"seed": seed, "policy": "stateless: after initialisation nothing draws random numbers"},
        **(frozen or {}),
        **(model or {}),
    }


def model_record(spec: ModelSpec, table: Any) -> dict[str, Any]:
    """The config of a spec, which a resume compares, unless it is the table `[model]`, which is recorded anyway."""
    return {} if spec.config is None or spec.config == table else {MODEL: as_dict(spec.config)}


def pipeline_record(plan: Plan, parallel: ParallelConfig, mesh: MeshSpec) -> dict[str, Any] | None:
    """The assignment of blocks to stages, for offline resharding; recorded even without pipeline parallelism.

    None if the numbers of the blocks cannot be told from their names.
    """
    if count_layers([f"{fqn}." for fqn in plan.parameters]) != len(plan.blocks):
        return None
    pp = mesh.degree("pp")
    return PipelineSpec(
        num_layers=len(plan.blocks),
        stages_per_rank=num_stages(parallel, mesh) // pp if pp > 1 else 1,
        style=pipeline_style(parallel, mesh),
        layers_per_stage=parallel.pp_layers_per_stage or None,
        has_tied_embeddings=bool(plan.spec.tied),
    ).to_dict()


def live_state(parallelized: Parallelized, optimizer: Optimizer | None) -> dict[str, Any]:
    """This rank's live tensors, which saving copies and loading fills; for a model with adapters, only the adapters."""
    weights = parallelized.model_state()
    state: dict[str, Any] = {"model": {name: weights[name] for name in adapters_of(weights) or weights}}
    if optimizer is None:
        return state
    routers = parallelized.router_state()
    return state | {"optimizer": optimizer.state()} | ({"routers": routers} if routers else {})


def find_start(resume: ResumeConfig, tiers: Sequence[str], control: ControlGroup, model: Any) -> Start:
    """The checkpoint to start from, the same on every rank: rank 0 searches, the others open its choice.

    With two tiers every rank searches, since the nearest may be a local disk.
    """
    if resume.auto and len(tiers) > 1:
        nearest = _nearest(tiers, control)
        if nearest is not None and nearest.manifest.kind == CheckpointKind.FULL:
            return Start(checkpoint=nearest, is_own=True)
        tiers = ()
    answer = control.from_first(lambda: _search(resume, tiers[0] if tiers else ""))
    if answer is None:
        return Start()
    checkpoint = open_for(model, answer.url, step=answer.step)
    if not answer.is_own:
        check_whole(checkpoint)
    has_all = checkpoint.manifest.kind == CheckpointKind.FULL
    model_only = not answer.is_own and (resume.model_only or not has_all)
    return Start(checkpoint=checkpoint, is_own=answer.is_own, model_only=model_only)


def is_new_run(resume: ResumeConfig, save_url: str, start: Start) -> bool:
    """Whether this attempt goes on from none before it, whose records may lie in the same folder."""
    return is_first_attempt() and not start.is_own and not (save_url and resume.auto)


def open_for(model: Any, url: str, *, step: int | None = None) -> Checkpoint:
    """Open a checkpoint under our names; torchtitan's are mapped by the rules for the family of `model` (`[model]`)."""
    checkpoint = open_checkpoint(url, step=step)
    if checkpoint.manifest.kind != CheckpointKind.FOREIGN and TORCHTITAN not in checkpoint.manifest.by_fqn:
        return checkpoint
    return foreign_formats.name_torchtitan(checkpoint, {} if model is None else as_dict(model))


def _nearest(tiers: Sequence[str], control: ControlGroup) -> Checkpoint | None:
    """The newest checkpoint that all ranks see in one tier; None only if no rank sees any and every tier answered."""
    try:
        return open_nearest(tiers, all_steps=control.all_gather)
    except NotCommittedError:
        if control.all_reduce_max([float(any(map(_is_not_empty, tiers)))])[0]:
            raise
        return None


def _is_not_empty(url: str) -> bool:
    """Whether a tier has a checkpoint; also True if it cannot be read."""
    try:
        open_checkpoint(url)
    except NotCommittedError:
        return False
    except TitanError:
        return True
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    url: str
    step: int
    is_own: bool


def _search(resume: ResumeConfig, save_url: str) -> _Found | None:
    if resume.auto and save_url:
        try:
            found = open_checkpoint(save_url)
            if found.manifest.kind == CheckpointKind.FULL:
                return _Found(url=save_url, step=found.step, is_own=True)
        except NotCommittedError:
            pass
    if resume.from_:
        found = open_checkpoint(resume.from_)
        return _Found(url=found.url, step=found.step, is_own=False)
    return None


def restore(
    start: Start,
    parallelized: Parallelized,
    optimizer: Optimizer,
    *,
    control: ControlGroup,
    fingerprint: str,
    other_data: bool,
    hooks: Mapping[str, Any] = NO_HOOKS,
) -> TrainingProgress:
    """Load the checkpoint of `start` into the live tensors and `hooks`; returns the progress to continue from."""
    checkpoint = start.checkpoint
    if checkpoint is None:
        return TrainingProgress()
    check_model(checkpoint, parallelized.spec.config, is_whole=not start.model_only)
    state = live_state(parallelized, None if start.model_only else optimizer)
    if start.model_only:
        check_all_taken(checkpoint, load_weights(checkpoint, [state]), tuple(state), control)
        return TrainingProgress()
    _check_optimizer(checkpoint, optimizer)
    training = checkpoint.manifest.training
    if "data" in training:
        check_data(checkpoint, fingerprint, other_data=other_data)
    else:
        log.warning("%s has no position in this data; reading starts at the first sample", checkpoint)
    report = load(checkpoint, {**state, **_stored_hooks(checkpoint, hooks)}, policy=LoadPolicy(extra="allow"))
    check_all_taken(checkpoint, report.loaded, tuple(state), control)
    return TrainingProgress(
        step=int(training["step"]),
        samples=int(training["data"]["position"]) if "data" in training else 0,
        tokens=int(training["tokens_seen"]),
        skipped=int(training.get("skipped_steps", 0)),
    )


def _stored_hooks(checkpoint: Checkpoint, hooks: Mapping[str, Any]) -> Mapping[str, Any]:
    """`hooks` if the checkpoint has a state for them; says so where only one of the two has any."""
    names = (*checkpoint.manifest.by_fqn, *checkpoint.manifest.objects_by_fqn)
    is_stored = any(name.startswith(f"{HOOKS}.") for name in names)
    if is_stored and not hooks:
        log.warning("%s has a state of hooks, which this run does not take: it has no such hooks", checkpoint)
    if hooks and not is_stored:
        log.warning("%s has no state of hooks; they start anew", checkpoint)
    return hooks if is_stored else NO_HOOKS


def _check_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Refuse the state of another rule, and averages of the weights on one side alone: they cannot begin or end within a run."""
    remedy = "set it back, or take the weights alone with resume.from and resume.model_only = true"
    name = checkpoint.manifest.training.get("optimizer", optimizer.name)
    if name != optimizer.name:
        raise ConfigError(
            f"{checkpoint} has the state of the optimizer {name!r}, this run has {optimizer.name!r}; {remedy}"
        )
    states = [fqn for fqn in checkpoint.manifest.by_fqn if fqn.startswith("optimizer.")]
    has_averages, decay = any(fqn.endswith(f".{AVERAGE}") for fqn in states), optimizer.config.ema_decay
    if has_averages != bool(decay):
        what = "averages" if has_averages else "no averages"
        raise ConfigError(f"{checkpoint} has {what} of the weights, but optimizer.ema_decay is {decay} here; {remedy}")


def load_weights(checkpoint: Checkpoint, states: Iterable[dict[str, Any]]) -> list[str]:
    """Load another run's or tool's weights, whose dtypes may be narrower than ours, state by state; returns their names."""
    loaded, casts = [], set()
    for state in states:
        report = load(checkpoint, state, policy=LoadPolicy(extra="allow", cast="allow"))
        loaded += report.loaded
        casts |= set(report.cast.values())
    for cast in sorted(casts):
        log.info("%s: weights are cast: %s, without loss", checkpoint, cast)
    return loaded


def check_all_taken(checkpoint: Checkpoint, names: Iterable[str], parts: Sequence[str], control: ControlGroup) -> None:
    """Refuse a checkpoint with tensors in `parts` that no rank has loaded; this rank, only its own stages, has loaded `names`.

    All modules of `[model.ahead]` may be left out; `check_model` has said so."""
    loaded = set(names)
    stored = [fqn for fqn in checkpoint.manifest.by_fqn if fqn.partition(".")[0] in parts]
    taken = control.all_reduce_max([float(fqn in loaded) for fqn in stored])
    left = [fqn for fqn, is_taken in zip(stored, taken, strict=True) if not is_taken]
    ahead = {name for name in stored if name.startswith(AHEAD)}
    if ahead <= {*left}:
        left = [name for name in left if name not in ahead]
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise LoadContractError(f"{checkpoint} has tensors that this model lacks: {', '.join(left[:5])}{more}")


def kept_assets(start: Start, tokenizer: bytes | None) -> dict[str, bytes]:
    """The assets to save with every checkpoint: those of the start, so that an imported model keeps its config and chat template.

    If the run's tokenizer differs from the start's, only the start's config.json, licence and model card are kept.
    """
    assets: dict[str, bytes] = {}
    if start.checkpoint is not None:
        assets = {name: start.checkpoint.asset(name) for name in start.checkpoint.manifest.assets if name != COMPILED}
        if assets.get(TOKENIZER) != tokenizer:
            assets = {name: data for name, data in assets.items() if _OF_ANY_TOKENIZER.fullmatch(name)}
    return assets if tokenizer is None else assets | {TOKENIZER: tokenizer}


def check_model(checkpoint: Checkpoint, model: Any, *, is_whole: bool = False) -> None:
    """Refuse a checkpoint of another `[model]`, a dataclass; shapes alone would miss a different rope_theta or norm_eps.

    Unless the run `is_whole`, with optimizer and data, it may leave out the modules of `[model.ahead]`, and says so."""
    saved = checkpoint.manifest.training.get(MODEL) or checkpoint.manifest.config.get("model")
    if not isinstance(saved, Mapping) or not saved or model is None:
        which = "this run's model has no ModelSpec.config" if saved else "it records no config of its model"
        log.warning("%s: only names and shapes are compared, since %s", checkpoint, which)
        return
    is_decoder = isinstance(model, ModelConfig)
    theirs, ours = (_spelled_out(found) if is_decoder else dict(found) for found in (saved, as_dict(model)))
    if not is_whole and "ahead" in theirs and "ahead" not in ours:
        log.warning("%s: its modules that predict further tokens ([model.ahead]) are left out", checkpoint)
        del theirs["ahead"]
    ignored = {"max_seq_len"} if is_decoder else set()
    keys = sorted({*theirs, *ours} - ignored)
    differing = [k for k in keys if not means_the_same(theirs.get(k), ours.get(k))]
    if differing:
        changes = ", ".join(f"{k}: checkpoint {theirs.get(k)}, config {ours.get(k)}" for k in differing)
        raise ConfigError(
            f"{checkpoint} is of another model: {changes}; set [model] to the checkpoint's, or use another save.url"
        )


def _spelled_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's `[model]` in a normal form: without None, with head_dim and the defaults of experts spelled out."""
    values: dict[str, Any] = {}
    for key, value in model.items():
        if value is not None:
            values[key] = _spelled_out(value) if isinstance(value, Mapping) else value
    if "experts" in values and "number" in values["experts"]:
        values["experts"] = _EXPERTS | values["experts"]
    if isinstance(values.get("ahead"), dict):
        values["ahead"].pop("weight", None)  # may change while training, as DeepSeek-V3's did
    if "dim" in values:
        values = _NEWER_KEYS | values
    if {"dim", "n_heads"} <= {*values} and not values.get("head_dim"):
        values["head_dim"] = values["dim"] // values["n_heads"]
    return values


def check_data(checkpoint: Checkpoint, fingerprint: str, *, other_data: bool) -> None:
    """Refuse another corpus, order or sequence length, in which the position would mean something else."""
    saved = checkpoint.manifest.training.get("data", {}).get("fingerprint")
    if saved == fingerprint:
        return
    if other_data:
        log.warning(
            "%s was trained on other data or in another order; the position is kept (resume.other_data)", checkpoint
        )
        return
    raise DataError(
        f"{checkpoint} was trained on other data, or in another order, than [data], [validation] and train.seed now give; "
        "set them back, or set resume.other_data = true to go on from the same position, or resume.model_only = true"
    )


def describe_start(start: Start, progress: TrainingProgress) -> str:
    """One line for the log."""
    if start.checkpoint is None:
        return "starting from scratch"
    mesh = start.checkpoint.manifest.mesh
    what = f"step {progress.step}, {progress.samples} samples" if progress.step else "weights"
    return f"resuming from {start.checkpoint} ({what}{'' if mesh is None else f', saved on mesh {mesh}'})"
