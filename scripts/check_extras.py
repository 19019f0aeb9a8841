"""Check the extras `wandb` and `datasets` against the real libraries, offline.

    pip install 'titan-ckpt[wandb,datasets]'
    python -m scripts.check_extras

Neither is part of the development install; CI tests the behaviour without them.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_ckpt.cli.main import main as titan_ckpt
from tools.paths import DEBUG_CONFIG

STEPS = 4
FILE_HEADER, PIECE_HEADER, BLOCK = 7, 7, 32 << 10


def train(folder: Path, *sets: str) -> dict[int, float]:
    """Losses of a short run in `folder`, by step."""
    fixed = (
        f"save.url={folder}", f"train.steps={STEPS}", "train.device=cpu", "log.tensorboard=false",
        f"data.cache={folder.parent}/tokens",
    )  # fmt: skip
    code = titan_ckpt(["train", DEBUG_CONFIG, *(word for text in (*fixed, *sets) for word in ("--set", text))])
    if code:
        raise SystemExit(f"training ended with exit code {code}")
    records = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run of Weights & Biases."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for content in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of the file, a LevelDB log behind a header of 7 bytes.

    Format: blocks of 32 KiB; pieces of (checksum 4, length 2, kind 1), kind 1 whole, 2 first, 3 middle, 4 last.
    """
    position, whole = FILE_HEADER, b""
    while position + PIECE_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < PIECE_HEADER:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            break
        start = position + PIECE_HEADER
        whole += data[start : start + length]
        position = start + length
        if kind in (1, 4):
            yield whole
            whole = b""


def check_wandb(folder: Path) -> str:
    """Every loss is in the offline run under its step."""
    os.environ["WANDB_MODE"] = "offline"
    losses = train(folder, "log.wandb=check")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {row["at_step"]: row["step/loss"] for row in history(path) if "step/loss" in row}
    if found != losses:
        raise SystemExit(f"{path}: losses {found}, expected {losses}")
    return f"{len(found)} steps in {path.name}"


def check_datasets(folder: Path) -> str:
    """A dataset saved to disk trains bit-equal to the same texts in JSONL."""
    import datasets

    texts = [f"document {number}: " + "so it goes, " * (number % 50 + 1) for number in range(2000)]
    table = datasets.table.InMemoryTable.from_pydict({"text": texts, "number": list(range(2000))})
    datasets.Dataset(table, fingerprint="check").save_to_disk(str(folder / "saved"))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    losses = train(folder / "hub", f"data.source=datasets:{folder}/saved")
    if losses != train(folder / "jsonl", f"data.source={folder}/texts.jsonl"):
        raise SystemExit("the dataset and the same texts as JSONL train differently")
    return f"{len(texts)} rows, losses bit-equal to JSONL's"


def main() -> int:
    """Run both; exit code 0 when both hold."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data").mkdir()
        sys.stdout.write(f"wandb: {check_wandb(root / 'wandb-run')}\n")
        sys.stdout.write(f"datasets: {check_datasets(root / 'data')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
