"""Weights that a run does not train: those that `train.freeze` names, the base of its adapters, and its frozen models.

No checkpoint of the run has the last two, so each records which they were (`FrozenWeights`), and a start reads the same ones
again: the recorded step, where the URL names none, and by the digest of the values, which other files with the same values have.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import ConfigError, LoadContractError, NotCommittedError
from titan_ckpt.loading.values_digest import Part, combine, sum_of
from titan_ckpt.location import parse_location, redact
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.resume import Start, check_all_taken, check_model, load_weights, open_for
from titan_ckpt.trainer.model.linear import Nf4Linear
from titan_ckpt.trainer.model.lora import BASE, check_whole, is_adapter
from titan_ckpt.trainer.model.stages import blocks_of
from titan_ckpt.trainer.parallel.initialize import local_box
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.parallel_model import Parallelized

log = logging.getLogger(__name__)
MODELS = "frozen"  # in the training record: frozen models by name


def freeze(parallelized: Parallelized, patterns: Sequence[str], control: ControlGroup) -> None:
    """Exclude weights whose names match a glob from training; ConfigError for a glob that matches nothing on any rank."""
    names = parallelized.named_parameters()
    quantised = {
        f"{fqn}.weight" for targets in nf4_targets(parallelized) for fqn in targets
    }  # which nothing trains anyway
    matched = {pattern: fnmatch.filter((*names, *quantised), pattern) for pattern in patterns}
    counts = control.all_reduce_max([len(found) for found in matched.values()] or [0])
    for pattern, count in zip(matched, counts, strict=False):  # one 0 if there are no patterns
        if not count:
            raise ConfigError(f"train.freeze: {pattern!r} matches no weight; one is called {next(iter(names))}")
    frozen = {name for found in matched.values() for name in found} - quantised
    for name in frozen:
        names[name].requires_grad_(False)
    if frozen:
        log.info("frozen: %d of %d weights of this rank", len(frozen), len(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    """Where weights were read (`url` without secrets) and the digest of their values (`values_digest`)."""

    url: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.url}@{self.step} (values {self.digest})"


def frozen_record(base: FrozenWeights | None, models: Mapping[str, FrozenWeights]) -> dict[str, Any]:
    """The part of the training record that names them."""
    record: dict[str, Any] = {} if base is None else {BASE: asdict(base)}
    return record | ({MODELS: {name: asdict(each) for name, each in models.items()}} if models else {})


def recorded_base(start: Start) -> FrozenWeights | None:
    """The base of the adapters in this run's own checkpoint; None if it has none, or was saved before it was recorded."""
    return _parse(_training(start).get(BASE))


def recorded_model(start: Start, name: str) -> FrozenWeights | None:
    """A frozen model of this run's own checkpoint; None if it had none of this name."""
    models = _training(start).get(MODELS)
    return _parse(models.get(name)) if isinstance(models, Mapping) else None


def _training(start: Start) -> Mapping[str, Any]:
    return start.checkpoint.manifest.training if start.checkpoint is not None and start.is_own else {}


def _parse(record: Any) -> FrozenWeights | None:
    if not isinstance(record, Mapping):
        return None
    return FrozenWeights(url=str(record["url"]), step=int(record["step"]), digest=str(record["digest"]))


def load_base(url: str, start: Start, parallelized: Parallelized, control: ControlGroup) -> FrozenWeights:
    """Load the frozen weights under the adapters; collective. ConfigError if the adapters were trained on others."""
    was, config = recorded_base(start), parallelized.spec.config
    if start.checkpoint is not None and not start.is_own:
        checkpoint = start.checkpoint
    else:
        checkpoint = open_again(url, was, config, control, what="the base of the adapters")
    check_model(checkpoint, config)
    weights, quantised = parallelized.model_state(), sum(len(targets) for targets in nf4_targets(parallelized))
    base = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    now = read_frozen(checkpoint, url, base, parallelized, control)
    log.info(
        "adapters on %s: %d of %d tensors of this rank are trained; %d are kept in NF4",
        checkpoint, len(weights) - len(base), len(weights) + quantised, quantised,
    )  # fmt: skip
    if start.checkpoint is not None and start.is_own:
        _check_base(start.checkpoint, was, now)
    return now


def _check_base(own: Checkpoint, was: FrozenWeights | None, now: FrozenWeights) -> None:
    if was is None:
        before = redact(str(own.manifest.config.get("resume", {}).get("from", "")))
        log.warning(
            "%s does not record the values of its adapters' base, which was %s; %s is taken for it", own, before, now
        )
    elif was.digest != now.digest:
        raise ConfigError(
            f"{own}: its adapters were trained on {was}, but resume.from gives {now}, which has other values. Set "
            "resume.from to the weights that they were trained on, wherever these are now; adapters on others begin anew, "
            "with a save.url of their own"
        )
    elif (was.url, was.step) != (now.url, now.step):
        log.info("the base of the adapters, %s@%d before, has the same values", was.url, was.step)


def load_model(name: str, url: str, start: Start, second: Parallelized, control: ControlGroup) -> FrozenWeights:
    """Load a frozen model; collective. Another URL than before is taken and said; other values at the same one: ConfigError."""
    was = recorded_model(start, name)
    checkpoint = open_again(url, was, second.spec.config, control, what=f"the frozen model {name!r}")
    now = read_frozen(checkpoint, url, second.model_state(), second, control)
    log.info("%s: %s, from %s", name, second.spec.name, checkpoint)
    if was is not None and was.digest != now.digest:
        if (was.url, was.step) == (now.url, now.step):
            raise ConfigError(
                f"{start.checkpoint}: the frozen model {name!r} was {was}; its files have been replaced since: {now}. Put the "
                "old ones back, or give the new ones another URL, which is taken with a warning"
            )
        log.warning("changed since the checkpoint: the frozen model %r: %s -> %s", name, was, now)
    return now


def open_again(url: str, was: FrozenWeights | None, model: Any, control: ControlGroup, *, what: str) -> Checkpoint:
    """Open the same checkpoint at `url` on every rank: the step it names, else that of `was` if its URL is the same."""
    opened_url, step = control.from_first(lambda: _choose(url, was, what))
    return open_for(model, opened_url, step=step)


def _choose(url: str, was: FrozenWeights | None, what: str) -> tuple[str, int]:
    location, found = parse_location(url), open_checkpoint(url)
    if was is not None and location.step is None and redact(location.url) == was.url and found.step != was.step:
        try:
            found = open_checkpoint(location.url, step=was.step)
        except NotCommittedError as error:
            raise ConfigError(
                f"{what} was {was}, which is gone: {error}. Name a copy of that step, or of its weights; "
                "retention keeps the steps that pins.txt in the run lists"
            ) from error
    check_whole(found)
    return found.url, found.step


def read_frozen(
    checkpoint: Checkpoint, url: str, weights: Mapping[str, Tensor], model: Parallelized, control: ControlGroup
) -> FrozenWeights:
    """Load `weights` of this rank and those it keeps in NF4, all that `checkpoint` has of a model; collective."""
    sums: dict[Part, int] = {}
    check_all_taken(checkpoint, load_weights(checkpoint, _in_turn(weights, model, sums)), ("model",), control)
    gathered = control.gather(sums)
    digest = control.from_first(lambda: combine(_joined(gathered, checkpoint)))
    return FrozenWeights(url=redact(parse_location(url).url), step=checkpoint.step, digest=digest)


def _in_turn(
    weights: Mapping[str, Tensor], model: Parallelized, sums: dict[Part, int]
) -> Iterator[dict[str, dict[str, Tensor]]]:
    """What to load at once: `weights`, then block by block those to quantise. Adds up `sums` of what has been loaded."""
    yield {"model": dict(weights)}
    sums.update(_sums(weights, model))
    for targets in nf4_targets(model):
        wholes = {
            f"{fqn}.weight": torch.empty(target.out_features, target.in_features, device=model.ranks.device)
            for fqn, target in targets.items()
        }
        yield {"model": wholes}
        sums.update(_sums(wholes, model))
        for fqn, target in targets.items():
            target.quantise(wholes.pop(f"{fqn}.weight"), f"{fqn}.weight")


def nf4_targets(model: Parallelized) -> list[dict[str, Nf4Linear]]:
    """The projections of each block of this rank that are kept in NF4, by FQN; blocks without any are left out."""
    blocks = [found for part in model.parts for found in blocks_of(model.plan, part).items()]
    found = [
        {name: m for name, m in block.named_modules(prefix=fqn) if isinstance(m, Nf4Linear)} for fqn, block in blocks
    ]
    return [targets for targets in found if targets]


def num_values(model: Parallelized) -> int:
    """The values of all weights of this rank's stages, also of those in NF4."""
    quantised = [target for targets in nf4_targets(model) for target in targets.values()]
    trained_or_not = sum(weight.numel() for weight in model.named_parameters().values())
    return trained_or_not + sum(target.in_features * target.out_features for target in quantised)


def _sums(weights: Mapping[str, Tensor], model: Parallelized) -> dict[Part, int]:
    sums = {}
    for fqn, tensor in weights.items():
        part = Part(fqn, tuple(tensor.shape), local_box(tensor, model.mesh, model.coordinate))
        sums[part] = sum_of(local_tensor(tensor), part)
    return sums


def _joined(of_ranks: Iterable[Mapping[Part, int]], checkpoint: Checkpoint) -> dict[Part, int]:
    """The sums of every box once. LoadContractError if ranks that hold the same box have read different values."""
    joined: dict[Part, int] = {}
    for rank, sums in enumerate(of_ranks):
        for part, value in sums.items():
            if joined.setdefault(part, value) != value:
                raise LoadContractError(
                    f"{checkpoint}: {part.fqn}: rank {rank} has read other values than the ranks before it: the files are "
                    "not the same on every machine; give a URL that all of them read"
                )
    return joined
