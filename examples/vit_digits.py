"""The vision transformer of vit.py on the 1797 handwritten digits that scikit-learn brings with it. Nothing is downloaded.

    pip install 'titan-ckpt[train,examples]'
    titan-ckpt train examples/vit_digits.toml --module examples/vit_digits.py --set mesh.dp_shard=2 --set mesh.tp=2

Replace them with your own files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_ckpt.errors import MissingExtraError
from titan_ckpt.trainer import ModelSpec, Normal
from titan_ckpt.trainer.seams.model import Initial, usual_initial

if TYPE_CHECKING:
    from examples import vit
else:
    import vit  # the file beside this one

metrics = vit.metrics


def model(config: vit.VitConfig) -> ModelSpec:
    """The same, with larger initial weights, by which 60 steps are enough."""
    return replace(vit.model(config), initial=lambda fqn: initial(fqn, config))


def initial(fqn: str, config: vit.VitConfig) -> Initial:
    """Weights that keep the size of what they multiply: 1 / sqrt(inputs)."""
    if not isinstance(usual_initial(fqn), Normal) or fqn == "embed.positions":
        return usual_initial(fqn)
    patch = config.channels * config.patch_size**2
    inputs = {"patches": patch, "2": 4 * config.dim}.get(fqn.split(".")[-2], config.dim)
    return Normal(std=inputs**-0.5)


class Digits:
    """The test set of UCI's "Optical Recognition of Handwritten Digits": 8 x 8, one channel."""

    losses_per_sample = 1
    fingerprint = "sklearn.datasets.load_digits, divided by 16, minus 0.5"

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits  # an extra
        except ImportError as error:
            raise MissingExtraError("scikit-learn", "examples", "the digits") from error
        found = load_digits()
        self._images_NCHW = torch.from_numpy(found.images).float()[:, None] / 16.0 - 0.5
        self._labels_N = torch.from_numpy(found.target).long()

    def __len__(self) -> int:
        return len(self._labels_N)

    def sample(self, index: int) -> dict[str, Tensor]:
        """`images` [1, 8, 8] and `labels`, a number."""
        return {"images": self._images_NCHW[index], "labels": self._labels_N[index]}


def data(_: Any) -> Digits:
    """The digits; `validation.fraction` holds some of them out."""
    return Digits()
