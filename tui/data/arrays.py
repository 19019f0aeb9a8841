"""Array types of the columns that the screens are computed from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
ByteArray = npt.NDArray[np.uint8]
LineMask = npt.NDArray[np.bool_]
