"""numpy without torch reads every dtype as torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titan_ckpt.format.dtypes import ELEMENT_SIZE, decode, storage_dtype
from titan_ckpt.state.state_dict import TORCH_DTYPE


@pytest.mark.parametrize("dtype", sorted({*ELEMENT_SIZE} - {"float4_e2m1fn_x2"}))
def test_values_match_torch(dtype: str) -> None:
    size = ELEMENT_SIZE[dtype]
    if size == 1:
        raw = np.arange(2 if dtype == "bool" else 256, dtype=np.uint8)
    elif size == 2:
        raw = np.arange(65536, dtype="<u2").view(np.uint8)
    else:
        raw = np.random.default_rng(0).integers(0, 256, 64 * size, dtype=np.uint8)
    theirs = torch.from_numpy(raw.copy()).view(TORCH_DTYPE[dtype])
    ours = decode(raw.view(storage_dtype(dtype)), dtype)
    if theirs.dtype.is_complex:
        expected = (theirs.to(torch.complex64) if size == 4 else theirs).numpy()
    elif theirs.dtype.is_floating_point:
        expected = theirs.to(torch.float64).numpy()
    else:
        expected = theirs.numpy()
    np.testing.assert_array_equal(ours, expected)
