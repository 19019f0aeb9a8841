"""A region of tensor parallelism, computed around the ring.

The projections that take the region's input multiply while it is gathered; the one that gives its output, while that is summed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.parallel.local_weights import local_tensor
from titan_ckpt.trainer.parallel.overlap.around import gather_products, products_scatter


class RingRegion:
    """The state of one region between the entry and the exit of a forward."""

    def __init__(self, fqn: str, group: dist.ProcessGroup, columns: Mapping[str, nn.Module]) -> None:
        self._fqn, self._group, self._columns = fqn, group, columns
        self._input: Tensor | None = None
        self._products: dict[str, Tensor] = {}
        self._output: Tensor | None = None
        for name, column in columns.items():
            column.forward = functools.partial(self._product, name)

    def enter(self, x: Tensor) -> Tensor:
        """All tokens of the region's input; the products of its column-wise projections are computed on the way."""
        of_all = {name: _local(column) for name, column in self._columns.items()}
        for name, (weight, _) in of_all.items():
            if weight.shape[1] != x.shape[-1]:
                raise self._takes_another(name)
        self._input, products = gather_products(x, [*of_all.values()], self._group)
        self._products = dict(zip(self._columns, products, strict=True))
        return self._input

    def sum_output_of(self, row: nn.Module) -> None:
        """Let the row-wise projection return this rank's tokens of the sum over ranks."""
        row.forward = functools.partial(self._summed, row)

    def leave(self, y: Tensor) -> Tensor:
        """`y`, which is summed already; ConfigError if it is anything but the row-wise projection's output."""
        output, self._input, self._products, self._output = self._output, None, {}, None
        if y is not output:
            raise ConfigError(
                f"async_tp: {self._fqn} does not return the output of its row-wise projection as it is, so the sum over ranks "
                "cannot overlap with the product: set mesh.async_tp = false"
            )
        return y

    def _product(self, name: str, x: Tensor) -> Tensor:
        if x is not self._input:
            raise self._takes_another(name)
        return self._products[name]

    def _takes_another(self, name: str) -> ConfigError:
        return ConfigError(
            f"async_tp: {name} multiplies another tensor than the input of its region {self._fqn}, so the product cannot "
            "overlap with the gather: set mesh.async_tp = false"
        )

    def _summed(self, row: Any, h: Tensor) -> Tensor:
        self._output = products_scatter(h, row.weight, row.bias, self._group)
        return self._output


def _local(projection: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's weight and bias."""
    return local_tensor(projection.weight), None if projection.bias is None else local_tensor(projection.bias)
