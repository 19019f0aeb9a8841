"""What may be saved on weak peers, and what the unmodified pipeline does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """All that decides the result; the same on every peer. The defaults are the unmodified pipeline.

    `features` of pictures `width` pixels wide; at most `per_picture` descriptors of each count as words, chosen at random, and
    `sample` of these take part in learning the vocabulary. `batch` is the number of pictures in one step of mini-batch k-means,
    0 for Lloyd's algorithm over all of them. Learning ends after `iterations`, or (Lloyd) when the mean distance falls by less
    than `tolerance` of itself.
    """

    features: str = "sift"
    width: int = 320
    per_picture: int = 100_000
    words: int = 256
    sample: float = 1.0
    batch: int = 0
    iterations: int = 100
    tolerance: float = 1e-4
    clusters: int = 21
    restarts: int = 16
    block: int = 20
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the command line of a peer and for the manifests of checkpoints."""
        return dataclasses.asdict(self)


UNMODIFIED = Choices()
MINI_BATCH: dict[str, Any] = {"batch": 64, "iterations": 30}
FRUGAL = dataclasses.replace(UNMODIFIED, features="gradients", width=160, sample=0.25, **MINI_BATCH)
# One change at a time, then all together.
VARIANTS = {
    "unmodified": UNMODIFIED,
    "pictures of 160 pixels": dataclasses.replace(UNMODIFIED, width=160),
    "ORB": dataclasses.replace(UNMODIFIED, features="orb"),
    "gradients on a grid": dataclasses.replace(UNMODIFIED, features="gradients"),
    "vocabulary from a quarter": dataclasses.replace(UNMODIFIED, sample=0.25),
    "mini-batch k-means": dataclasses.replace(UNMODIFIED, **MINI_BATCH),
    "SIFT, all the others": dataclasses.replace(FRUGAL, features="sift"),
    "ORB, all the others": dataclasses.replace(FRUGAL, features="orb"),
    "all": FRUGAL,
}
