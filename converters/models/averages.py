"""The averages of a run's weights (`optimizer.ema_decay` of the trainer) in the place of the weights."""

from __future__ import annotations

from dataclasses import replace

from titan_ckpt.errors import LoadContractError
from titan_ckpt.format.manifest import Manifest

_WEIGHTS, _STATE, _AVERAGE = "model.", "optimizer.state.", ".ema"


def averaged(manifest: Manifest, where: str) -> Manifest:
    """`manifest` with the averages under the names of the weights; what the optimizer does not hold, such as biases of routers,
    stays.

    LoadContractError if the run kept no averages, or has made no step in which they begin.
    """
    names = manifest.by_fqn
    weights = {fqn: f"{_STATE}{fqn.removeprefix(_WEIGHTS)}" for fqn in names if fqn.startswith(_WEIGHTS)}
    taken = {f"{state}{_AVERAGE}": fqn for fqn, state in weights.items() if f"{state}{_AVERAGE}" in names}
    if not taken:
        raise LoadContractError(f"{where} has no averages of the weights: its run had optimizer.ema_decay = 0")
    lost = [fqn for fqn, state in weights.items() if f"{state}.step" in names and f"{state}{_AVERAGE}" not in taken]
    if lost:
        raise LoadContractError(f"{where} has averages of some weights, but none of {', '.join(lost[:5])}")
    if not manifest.training.get("step", manifest.step):
        raise LoadContractError(f"{where}: averages begin with the first step, and this is step 0")
    swapped = taken | {fqn: average for average, fqn in taken.items()}
    return replace(manifest, tensors=tuple(replace(t, fqn=swapped.get(t.fqn, t.fqn)) for t in manifest.tensors))
