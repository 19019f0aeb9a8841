"""Dispatch modes of torch that a caller is in, such as FakeTensorMode: they would stand between us and a tensor's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_modes() -> Iterator[None]:
    """Run torch's operations as they are, whatever mode the caller is in. Also a decorator."""
    with _disable_current_modes():
        yield
