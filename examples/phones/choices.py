"""What may be saved on weak peers, and what the unmodified pipeline does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import ConfigError

DIMENSIONS = {"sift": 128, "orb": 256, "gradients": 128}  # numbers in a descriptor, by kind of features
LEAST: Mapping[str, int | float] = {
    "width": 1, "per_picture": 1, "words": 1, "batch": 0, "iterations": 1, "tolerance": 0.0, "clusters": 1, "restarts": 1,
    "block": 1, "seed": 0,
}  # fmt: skip
LIMIT = 2**31


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

    def __post_init__(self) -> None:
        if self.features not in DIMENSIONS:
            raise ConfigError(f"choices: features is {self.features!r}; expected one of {', '.join(DIMENSIONS)}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) not in {int, type(least)} or not least <= value < LIMIT:
                kind = "a whole number" if isinstance(least, int) else "a number"
                raise ConfigError(f"choices: {name} is {value!r}; expected {kind} from {least} to {LIMIT - 1}")
        if type(self.sample) not in {int, float} or not 0 < self.sample <= 1:
            raise ConfigError(f"choices: sample is {self.sample!r}; expected a number above 0, at most 1")

    @classmethod
    def read(cls, text: str) -> Choices:
        """Fields that differ from the defaults, as a JSON object."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"choices: not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f'choices: expected a JSON object such as {{"features": "orb"}}, found {text}')
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(fields.keys() - set(known)):
            raise ConfigError(f"choices: there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**fields)

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
