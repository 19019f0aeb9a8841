"""A mesh of ranks with named axes.

Ranks are numbered as by torch's `init_device_mesh`: `arange(world).view(degrees)`, the last axis fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from titan_ckpt.arguments import check_type
from titan_ckpt.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
FOLD = "+"
MAX_RANKS = 131_072
"""Ranks of the largest mesh: plans and listings take time and memory for each."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Degrees of `pp`, `dp_replicate`, `dp_shard`, `cp`, `ep`, `tp`, outermost first.

    Create it by `parse` or `of`: omitted axes have degree 1; an unknown axis or a degree below 1 is a ConfigError.
    """

    degrees: tuple[int, ...] = (1,) * len(AXES)

    def __post_init__(self) -> None:
        if not isinstance(self.degrees, tuple) or len(self.degrees) != len(AXES):
            raise ConfigError(f"degrees are {self.degrees!r}; use MeshSpec.of or MeshSpec.parse, which name the axes")
        for axis, degree in zip(AXES, self.degrees, strict=True):
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ConfigError(f"mesh axis {axis}: degree {degree!r} is not a positive whole number")

    @staticmethod
    def of(degrees: Mapping[str, int]) -> MeshSpec:
        """The mesh with these degrees by axis name.

        >>> MeshSpec.of({"tp": 2, "pp": 4}).world_size
        8
        """
        check_type(
            degrees, "degrees", Mapping, hint="degrees by axis, such as dict(zip(mesh.mesh_dim_names, mesh.shape))"
        )
        for axis, degree in degrees.items():
            if axis not in AXES:
                raise ConfigError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
            if not isinstance(degree, int) or not 1 <= degree <= MAX_RANKS:
                is_huge = isinstance(degree, int) and degree.bit_length() > 128
                shown = f"of {degree.bit_length()} bits" if is_huge else f"{degree!r:.80}"
                raise ConfigError(f"mesh axis {axis}: degree {shown} is not a whole number from 1 to {MAX_RANKS}")
        mesh = MeshSpec(tuple(degrees.get(axis, 1) for axis in AXES))
        if mesh.world_size > MAX_RANKS:
            raise ConfigError(f"mesh {mesh}: {mesh.world_size} ranks; the largest mesh has {MAX_RANKS}")
        return mesh

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """Parse `axis=degree,...`; an empty text or `1` is a single rank.

        >>> str(MeshSpec.parse("tp=4,pp=2"))
        'pp=2,tp=4'
        """
        check_type(text, "mesh", str, hint="a mesh such as 'pp=2,dp_shard=4,tp=2'")
        degrees: dict[str, int] = {}
        for item in [] if text.strip() in ("", "1") else text.split(","):
            axis, _, degree = (part.strip() for part in item.partition("="))
            if not (degree.isascii() and degree.isdigit() and len(degree) < 20):
                raise ConfigError(
                    f"mesh {text[:60]!r}: {item.strip()[:60]!r} is not axis=degree; for example pp=2,dp_shard=4,tp=2"
                )
            if axis in degrees:
                raise ConfigError(f"mesh {text!r}: axis {axis!r} is given twice")
            degrees[axis] = int(degree)
        return MeshSpec.of(degrees)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees)

    def degree(self, axes: str) -> int:
        """Size of an axis, or of several folded into one such as `dp_shard+cp`."""
        return prod(self.degrees[_position(axis)] for axis in axes.split(FOLD))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        place = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, place[axis] = divmod(rank, degree)
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`; omitted axes are 0."""
        rank = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            rank = rank * degree + coordinate.get(axis, 0)
        return rank

    def fold(self, axes: str, coordinate: Mapping[str, int]) -> int:
        """Position on an axis, or on several folded into one (row-major, in the order of `axes`)."""
        index = 0
        for axis in axes.split(FOLD):
            index = index * self.degrees[_position(axis)] + coordinate[axis]
        return index

    def items(self) -> Iterator[tuple[str, int]]:
        """(axis, degree) of the axes with more than one rank."""
        return ((axis, degree) for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1)

    def __str__(self) -> str:
        return ",".join(f"{axis}={degree}" for axis, degree in self.items()) or "1"


def _position(axis: str) -> int:
    try:
        return AXES.index(axis)
    except ValueError:
        raise ConfigError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}") from None


def format_coordinate(coordinate: Mapping[str, int], axes: Iterable[str] = AXES) -> str:
    """Coordinate as text for logs.

    >>> format_coordinate({"dp_shard": 1, "tp": 0}, ["dp_shard", "tp"])
    'dp_shard1 tp0'
    """
    return " ".join(f"{axis}{coordinate[axis]}" for axis in axes)
