"""Import of a synthetic DeepSeek-V3 folder in block-FP8, beside a plain copy of what the import writes.

    python -m benchmarks.conversion.convert_packed [--rounds 3] [--dir DIR]

The folder is 2.1 GB, what is written twice that: bfloat16. Every case runs in its own process, as in `convert_hf`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conversion import convert_hf
from titan_ckpt.converters.hf.config import encode_config, hf_config
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.families import expected_tensors
from titan_ckpt.converters.models.spec import Experts, Latent, ModelSpec
from titan_ckpt.sharding.placement import Shape
from tools.report import TAKEN_NOTE, Measurement, interleave, median, spread, write_section

SPEC = ModelSpec(
    family="deepseek_v3", vocab_size=32000, dim=2048, n_layers=5, n_heads=16, n_kv_heads=16, head_dim=192, ffn_dim=8192,
    norm_eps=1e-6, rope_theta=1e4, max_seq_len=4096, latent=Latent(kv_rank=512, q_rank=512),
    experts=Experts(
        number=56, per_token=8, ffn_dim=1408, scores="sigmoid", correction_bias=True, groups=8, groups_per_token=4, scale=2.5,
        shared=1, dense_layers=1,
    ),
)  # fmt: skip
BLOCK = 128
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
PEAK_MIB, SLOWER = 270, 1.5
NOTES = """DeepSeek-V3's names and blocks of 128 x 128, multiplied out to bfloat16 and digested on the way. The copy is
`shutil.copyfile` of what was written and an fsync for each file.
"""


def make_model(folder: Path) -> int:
    """Write the folder, its values in a pattern of finite ones; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    config = hf_config(SPEC, base=None, dtype="bfloat16") | {"quantization_config": FP8}
    (folder / "config.json").write_bytes(encode_config(config))
    generator = np.random.default_rng(0)
    pattern = generator.integers(0, 256, 8 << 20, dtype=np.uint8) & np.uint8(
        0xF7
    )  # without the two NaNs, 0x7F and 0xFF
    rows = [row for name, shape in expected_tensors(SPEC).items() for row in stored(name, shape)]
    header = encode_header(rows, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for _, dtype, shape in rows:
            file.write(content(pattern, dtype, shape))
        return file.tell()


def stored(name: str, shape: Shape) -> list[tuple[str, str, Shape]]:
    """The tensors of the files for one of the model."""
    if "proj" not in name or len(shape) != 2:
        return [(name, "float32" if name.endswith("bias") else "bfloat16", shape)]
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return [(name, "float8_e4m3fn", shape), (f"{name}_scale_inv", "float32", blocks)]


def content(pattern: np.ndarray[Any, Any], dtype: str, shape: Shape) -> bytes:
    """Bytes of a tensor."""
    count = int(np.prod(shape))
    if dtype == "float32":
        return np.full(count, 0.01, dtype="<f4").tobytes()
    size = count * (1 if dtype == "float8_e4m3fn" else 2)
    return np.resize(pattern, size).tobytes()


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    arguments = parser.parse_args()
    peaks, processor = dict[str, list[float]](), dict[str, list[float]]()

    def run(name: str, case: str, source: Path, out: Path) -> Callable[[], float]:
        def keep(peak_mib: float, processor_s: float) -> None:
            peaks.setdefault(name, []).append(peak_mib)
            processor.setdefault(name, []).append(processor_s)

        return convert_hf.once(case, source, out, keep)

    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        size = make_model(folder / "model")
        convert_hf.ours_in(str(folder / "model"), str(folder / "run"))()
        cases = {
            "import": run("import", "ours in", folder / "model", folder / "out"),
            "copy": run("copy", "copy", folder / "run", folder / "out"),
        }
        seconds = interleave(cases, rounds=arguments.rounds)
    share, peak = median(seconds["import"]) / median(seconds["copy"]), max(peaks["import"])
    bars = [
        Measurement(
            what="import / copy of what is written", figure=f"{share:.2f} ({spread(seconds['import'])})", bar=f"<= {SLOWER} x",
            holds=share <= SLOWER, peer=spread(seconds["copy"]),
        ),
        Measurement(
            what="import: peak RSS", figure=f"{peak:.0f} MiB", bar=f"<= {PEAK_MIB} MiB", holds=peak <= PEAK_MIB,
            peer=f"{max(peaks['copy']):.0f} MiB",
        ),
        Measurement(
            what="import: seconds of the processor", figure=f"{min(processor['import']):.1f} s", bar="shown", holds=True,
            peer=f"{min(processor['copy']):.1f} s",
        ),
    ]  # fmt: skip
    write_section("convert packed", f"Import of {size / 1e9:.1f} GB of block-FP8", bars, NOTES + TAKEN_NOTE)


if __name__ == "__main__":
    main()
