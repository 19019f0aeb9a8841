"""Conversion streams: memory is bounded for any model size, and torch is not imported unless values change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import config, tensors, write_model
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.families import expected_tensors
from titan_ckpt.store.any_fsspec import FsspecStore
from titan_ckpt.store.base import ObjectInfo

MIB = 1 << 20
CHILD = """
import json, sys
from pathlib import Path
from titan_ckpt.cli.main import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
print(json.dumps({"code": code, "peak": peak, "torch": "torch" in sys.modules}))
"""


def _convert(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "convert", *arguments], check=True, capture_output=True, text=True
    )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _large_model(folder: Path) -> tuple[int, int]:
    """Write a sparse model of about 400 MiB of zeros; returns (bytes of all tensors, bytes of the largest)."""
    of = config(
        vocab_size=24_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(of))
    shapes = expected_tensors(spec_from_hf(of, "test"))
    sizes = [4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()]
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header([(name, "float32", shape) for name, shape in shapes.items()], {"format": "pt"}))
        file.truncate(file.tell() + sum(sizes))
    return sum(sizes), max(sizes)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a process's peak memory")
def test_memory_is_bounded_and_torch_is_not_imported(tmp_path: Path) -> None:
    total, largest = _large_model(tmp_path / "in")
    assert total > 400 * MIB
    came = _convert("from-hf", str(tmp_path / "in"), str(tmp_path / "run"), "--layout", "torchtitan")
    went = _convert("to-hf", str(tmp_path / "run"), str(tmp_path / "out"))
    for facts in (came, went):
        assert facts["code"] == 0
        assert not facts["torch"]
        assert facts["peak"] <= 270 * MIB
    cast = _convert("to-hf", str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16")
    assert cast["peak"] <= 270 * MIB + 2.5 * largest


def test_object_store_gets_the_files_that_make_a_model_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = FsspecStore.write

    def recorded(self: FsspecStore, path: str, parts: Iterable[Any]) -> ObjectInfo:
        entry = write(self, path, parts)
        written.append(path)
        return entry

    monkeypatch.setattr(FsspecStore, "write", recorded)
    model = write_model(tmp_path / "in", config(), tensors(config()), extra={"tokenizer.json": '{"added_tokens": []}'})
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), "memory://order/out", max_shard_bytes=20_000)
    assert written[-2:] == ["model.safetensors.index.json", "config.json"]
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"} <= set(written)
    assert len([path for path in written if path.endswith(".safetensors")]) > 2
