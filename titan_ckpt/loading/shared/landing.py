"""Host memory through which the parts of a batch pass on their way from the store, or from another rank, to their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from titan_ckpt.loading.read_plan import Region, copy_into, pinned_memory
from titan_ckpt.loading.requests import host_memory
from titan_ckpt.state.state_dict import TORCH_DTYPE, as_bytes

ALIGNMENT = 16


class Landing:
    """Memory for `regions`, row-major as stored: that of the tensor itself if one region alone lies in it like this.

    Ranks that hold the same regions have the same layout.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        if len(regions) == 1 and regions[0].is_direct and regions[0].target.is_contiguous():
            self._views = [regions[0].target]
            self.memory = as_bytes(regions[0].target)
            return
        ends = [0]
        for region in regions:
            ends.append(ends[-1] + -(-region.size_bytes // ALIGNMENT) * ALIGNMENT)
        allocate = pinned_memory if any(region.target.is_cuda for region in regions) else host_memory
        self.memory = allocate(ends[-1])
        self._views = [
            torch.frombuffer(self.memory[at : at + region.size_bytes], dtype=TORCH_DTYPE[region.entry.dtype]).view(
                region.box.sizes
            )
            for at, region in zip(ends[:-1], regions, strict=True)
        ]

    @property
    def names(self) -> str:
        """The first tensor, and how many more there are."""
        more = f" and {len(self._regions) - 1} more" if len(self._regions) > 1 else ""
        return f"{self._regions[0].entry.fqn}{more}"

    def inside(self) -> list[Region]:
        """The regions with this memory as their target."""
        pairs = zip(self._regions, self._views, strict=True)
        return [replace(region, target=view, is_direct=True) for region, view in pairs]

    def install(self) -> None:
        """Put the parts into their tensors."""
        for region, view in zip(self._regions, self._views, strict=True):
            if view is not region.target:
                copy_into(region.target, view)
