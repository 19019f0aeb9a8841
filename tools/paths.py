"""Folders of this repository that tests, scripts and benchmarks read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
DEBUG_CONFIG = str(CONFIGS / "debug.toml")
"""The smallest model: trains in seconds on a CPU."""
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"

DATA = ROOT / "tests" / "data"
INCIDENTS = DATA / "flight_recorder"
"""One folder per recorded hang or crash; `MANIFEST.json` holds the truth about each."""
