"""Local descriptors of a picture: SIFT, ORB, or gradients on a fixed grid. Rows of bytes, so that a checkpoint stays small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.phones.choices import DIMENSIONS
from examples.phones.pictures import Gray
from titan_ckpt.errors import MissingExtraError

Descriptors = NDArray[np.uint8]
"""One row for each place of the picture."""

DIRECTIONS, CELL, CELLS = 8, 4, 4  # as SIFT: 4 x 4 cells with 8 directions each; a cell is 4 x 4 pixels
LARGEST_SHARE = 0.2  # of one number in a descriptor, against highlights (Lowe 2004, section 6.1)
SMALLEST_CONTRAST = 0.4  # of a patch, as the norm of its descriptor before it is normalised


def describe(picture: Gray, kind: str) -> Descriptors:
    """All descriptors of a picture by one of `DIMENSIONS`; there may be none."""
    if kind == "gradients":
        return grid_gradients(picture)
    return _keypoints(picture, kind)


def grid_gradients(picture: Gray) -> Descriptors:
    """Histograms of gradient directions around the points of a grid, without a search for keypoints.

    Not invariant to turns and to scale: for pictures from hands that hold the phone upright. Twice as many pixels apart as a
    cell is wide; patches with hardly any contrast are left out.
    """
    if min(picture.shape) < CELL * CELLS:
        return np.zeros((0, DIMENSIONS["gradients"]), np.uint8)
    down, right = np.gradient(picture)
    strength = np.hypot(right, down)
    angle = np.arctan2(down, right) * (DIRECTIONS / (2 * np.pi))
    low = np.floor(angle)
    part = (angle - low).astype(np.float32)
    first = low.astype(np.int64) % DIRECTIONS
    rows, columns = (size // CELL for size in picture.shape)
    cell = (np.arange(rows * CELL) // CELL)[:, None] * columns + np.arange(columns * CELL) // CELL
    inside = np.s_[: rows * CELL, : columns * CELL]
    count = rows * columns * DIRECTIONS
    index = cell * DIRECTIONS
    histogram = np.bincount(
        (index + first[inside]).ravel(), (strength * (1 - part))[inside].ravel(), count
    ) + np.bincount((index + (first[inside] + 1) % DIRECTIONS).ravel(), (strength * part)[inside].ravel(), count)
    cells = histogram.astype(np.float32).reshape(rows, columns, DIRECTIONS)
    windows = np.lib.stride_tricks.sliding_window_view(cells, (CELLS, CELLS), axis=(0, 1))[::2, ::2]
    return _as_bytes(windows.reshape(-1, DIRECTIONS * CELLS * CELLS))


def _as_bytes(rows: NDArray[np.float32]) -> Descriptors:
    """Normalised rows, without those of flat patches."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows[norms[:, 0] > SMALLEST_CONTRAST]
    rows = np.minimum(rows / np.linalg.norm(rows, axis=1, keepdims=True), LARGEST_SHARE)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return np.minimum(rows * 512, 255).astype(np.uint8)


def _keypoints(picture: Gray, kind: str) -> Descriptors:
    """SIFT or ORB of OpenCV with default settings; the 256 bits of ORB as 0 and 1, so that k-means compares them by Hamming."""
    try:
        import cv2  # of the extra `examples`
    except ModuleNotFoundError as error:
        raise MissingExtraError("OpenCV", "examples", f"features {kind}") from error

    cv2.setNumThreads(1)  # a weak peer has one core
    extractor = cv2.SIFT_create() if kind == "sift" else cv2.ORB_create()
    _, found = extractor.detectAndCompute((picture * 255).astype(np.uint8), None)
    if found is None:
        return np.zeros((0, DIMENSIONS[kind]), np.uint8)
    return found.astype(np.uint8) if kind == "sift" else np.unpackbits(found, axis=1)
