"""The box of a tensor that a rank holds, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.sharding.placement import Box, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """The box of one tensor that a rank holds.

    `placements` are the (axis, tensor dimension) pairs in the order of the cuts, None if the mesh has other axis names.
    """

    fqn: str
    dtype: str
    global_shape: Shape
    placements: tuple[tuple[str, int], ...] | None
    offsets: Shape
    sizes: Shape

    @property
    def box(self) -> Box:
        """The shard as a box of the global tensor."""
        return Box(self.offsets, self.sizes)

    @property
    def size_bytes(self) -> int:
        """Raw bytes of the shard."""
        return self.box.num_elements * ELEMENT_SIZE[self.dtype]
