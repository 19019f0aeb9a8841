"""A 1.2 B Llama on one GPU (bf16, compiled, Float8 rowwise, MXFP8) against torchtitan 0.3.0, and the cost of a save.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 triton torch==<the same>
    python -m benchmarks.training.trainer_gpu [--titan titan/bin/python] [--rounds 20]
    python -m benchmarks.training.trainer_gpu --tiny [--titan ...]     # every path on a CPU, in a minute; writes no table

Ours and torchtitan's ranks alternate step by step, so both models are in the GPU's memory at once; a ratio is the median over
pairs of steps, torchtitan's seconds over ours. A save's stall is compared with copying the same bytes to pinned memory. With
--json FILE all rows are written there, each with why it was not run, if so; `benchmarks.gpu` runs this with others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.training.turns import Job
from titan_ckpt.demo.ports import free_port
from titan_ckpt.trainer.model.decoder import ModelConfig, flops_per_token
from titan_ckpt.trainer.report.metrics import FLOAT8_PEAK_RATIO, PEAK_FLOPS
from tools.report import Measurement, median, spread, write_section
from tools.training.hf_shapes import LLAMA3_SCALING

OURS, THEIRS, SAVING = (
    "benchmarks.training.trainer_gpu_rank",
    "benchmarks.training.trainer_gpu_titan",
    "benchmarks.training.trainer_gpu_save",
)
WARMUP = 5
# torchtitan's "1B" and, for --tiny, its "debugmodel"
LARGE = ModelConfig(
    vocab_size=128_256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, rope_theta=500_000.0,
    rope_scaling=LLAMA3_SCALING, max_seq_len=131_072, tied_embeddings=True,
)  # fmt: skip
TINY = replace(
    LARGE, vocab_size=2048, dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, tied_embeddings=False
)
VARIANTS = {
    "bf16": {"compile": False, "float8": ""},
    "bf16, compiled": {"compile": True, "float8": ""},
    "Float8 rowwise, compiled": {"compile": True, "float8": "rowwise"},
}
MX_NAME, MX_VARIANT = "MXFP8, compiled", {"compile": True, "float8": "mxfp8"}  # torchtitan is not asked for it
FLOAT8_BAR, STALL_BAR, UPLOADING_BAR = 1.25, 1.25, 0.8
TITLE = "One GPU: a Llama of 1.2 B parameters"
NOTES = """{samples} samples of {seq_len} tokens a step; forward, backward, clipping and AdamW, no data loading, no logging, no
recomputation. MFU counts 6 FLOPs per weight that is multiplied and 12 per layer, head element and key (no causal discount)
against the bf16 peak of {peak:.0f} TFLOPS; Float8's own peak is twice that. torchtitan runs its own model, `parallelize`, loss,
optimizer and clipping with its defaults, without the CUDA graphs of its `Trainer`."""


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of both sides."""
    if arguments.tiny:
        return {"device": "cpu", "is_tiny": True, "samples": 2, "seq_len": 128, "threads": 1}
    return {
        "device": "cuda",
        "is_tiny": False,
        "samples": arguments.samples,
        "seq_len": arguments.seq_len,
        "threads": 8,
    }


def pairs(first: Job, second: Job | None, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each step after the warm-up, in turn."""
    ours, theirs = [], []
    for _ in range(WARMUP + rounds):
        ours.append(first.step().wall_s)
        if second is not None:
            theirs.append(second.step().wall_s)
    return ours[WARMUP:], theirs[WARMUP:]


def measure(name: str, options: dict[str, Any], titan: str | None, rounds: int) -> tuple[list[float], list[float]]:
    """Our seconds per step in this variant, and torchtitan's if available."""
    asked = options | (VARIANTS | {MX_NAME: MX_VARIANT})[name]
    with Job(sys.executable, OURS, asked, world_size=1, port=free_port()) as ours:
        if titan is None:
            return pairs(ours, None, rounds)
        with Job(titan, THEIRS, asked, world_size=1, port=free_port()) as theirs:
            return pairs(ours, theirs, rounds)


def stall(options: dict[str, Any], rounds: int) -> Measurement:
    """How long a save blocks training, against the copy to pinned memory alone."""
    copies, saves = options | {"what": "copy"}, options | {"what": "save"}
    found: list[tuple[float, float]] = []
    with (
        Job(sys.executable, SAVING, saves, world_size=1, port=free_port()) as ours,
        Job(sys.executable, SAVING, copies, world_size=1, port=free_port()) as raw,
    ):
        for _ in range(rounds + 1):
            found.append((ours.step().wall_s, raw.step().wall_s))
            ours.step()  # waits for the upload, which is not part of the stall
    kept, copied = ([pair[side] for pair in found[1:]] for side in (0, 1))  # the first save allocates the buffers
    ratio = median([save / copy for save, copy in found[1:]])
    return Measurement(
        what="a save keeps training for, over the copy alone", figure=f"{ratio:.2f} x ({spread(kept)})",
        bar=f"<= {STALL_BAR} x", holds=ratio <= STALL_BAR, peer=spread(copied),
    )  # fmt: skip


def uploading(options: dict[str, Any], rounds: int) -> Measurement:
    """The rate of steps that begin right after a save, while it uploads, over that of steps before it."""
    before, during = [], []
    with Job(sys.executable, SAVING, options | {"what": "train"}, world_size=1, port=free_port()) as job:
        for _ in range(rounds + 1):
            before.append(job.step().wall_s)
            job.step()  # saves
            during.append(job.step().wall_s)
            job.step()  # waits for the upload
    rate = median([a / b for a, b in zip(before[1:], during[1:], strict=True)])
    return Measurement(
        what="training rate while uploading",
        figure=f"{rate:.2f}",
        bar=f">= {UPLOADING_BAR}",
        holds=rate >= UPLOADING_BAR,
    )


def pinned(options: dict[str, Any], rounds: int) -> Measurement:
    """Copies from the GPU to pinned memory against copies to pageable memory."""
    with (
        Job(sys.executable, SAVING, options | {"what": "copy"}, world_size=1, port=free_port()) as fast,
        Job(sys.executable, SAVING, options | {"what": "copy, pageable"}, world_size=1, port=free_port()) as slow,
    ):
        times = [(fast.step().wall_s, slow.step().wall_s) for _ in range(rounds + 1)][1:]
    ratio = median([b / a for a, b in times])
    figure = f"{ratio:.2f} x faster ({spread([a for a, _ in times])})"
    return Measurement(
        what="copy to pinned memory, over pageable", figure=figure, bar=">= 1.0 x", holds=ratio >= 1.0,
        peer=spread([b for _, b in times]),
    )  # fmt: skip


def rows(
    seconds: dict[str, tuple[list[float], list[float]]], options: dict[str, Any], peak: float | None
) -> list[Measurement]:
    """Tokens per second, MFU and ratios."""
    tokens = options["samples"] * options["seq_len"]
    flops = flops_per_token(TINY if options["is_tiny"] else LARGE, options["seq_len"])
    bars = []
    for name, (ours, theirs) in seconds.items():
        rate = tokens / median(ours)
        used = "" if peak is None else f", MFU {rate * flops / peak:.1%}"
        if peak is not None and VARIANTS[name]["float8"]:
            used += f" ({rate * flops / peak / FLOAT8_PEAK_RATIO:.1%} of Float8's)"
        ratio = median([b / a for a, b in zip(ours, theirs, strict=True)]) if theirs else None
        figure = f"{rate:,.0f} tok/s{used}" + ("" if ratio is None else f", {ratio:.2f} x")
        bar, peer = (
            (">= 1.0 x", f"{tokens / median(theirs):,.0f} tok/s") if theirs else ("-", "torchtitan not installed")
        )
        bars.append(Measurement(what=name, figure=figure, bar=bar, holds=ratio is None or ratio >= 1.0, peer=peer))
    compiled, narrow = (median(seconds[name][0]) for name in ("bf16, compiled", "Float8 rowwise, compiled"))
    gain = compiled / narrow
    bars.append(
        Measurement(
            what="Float8 over bf16, both compiled",
            figure=f"{gain:.2f} x",
            bar=f">= {FLOAT8_BAR} x",
            holds=gain >= FLOAT8_BAR,
        )
    )
    return bars


def narrow(seconds: list[float], compiled_s: float) -> list[Measurement]:
    """MXFP8 against compiled bf16."""
    gain = compiled_s / median(seconds)
    return [Measurement(what="MXFP8 over bf16, both compiled", figure=f"{gain:.2f} x", bar="-", holds=True)]


def mxfp8_missing(*, is_tiny: bool) -> str:
    """Why MXFP8 cannot be measured here; a CPU emulates it, which shows that the path runs."""
    import torch

    if is_tiny:
        return ""
    major, minor = torch.cuda.get_device_capability()
    return (
        ""
        if (major, minor) in ((10, 0), (10, 3))
        else f"needs compute capability 10.0 or 10.3, this is {major}.{minor}"
    )


def gpu_name() -> str:
    """The measured GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table (not with --tiny); return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", help="a python that has torchtitan 0.3.0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU: do all paths run?")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    asked = parser.parse_args(arguments)
    options, name = options_of(asked), gpu_name()
    if not asked.tiny and not name:
        sys.stderr.write("no GPU here; --tiny runs the same paths on a CPU\n")
        return 2
    peak = next((peak for known, peak in PEAK_FLOPS.items() if known in name), None) if name else None
    seconds = {variant: measure(variant, options, asked.titan, asked.rounds) for variant in VARIANTS}
    few, why_no_mx = min(asked.rounds, 5), mxfp8_missing(is_tiny=asked.tiny)
    bars = [*rows(seconds, options, peak), stall(options, few), uploading(options, few), pinned(options, few)]
    if not why_no_mx:
        bars += narrow(measure(MX_NAME, options, None, asked.rounds)[0], median(seconds["bf16, compiled"][0]))
    if asked.json is not None:
        skipped = [{"what": MX_NAME, "not run": why_no_mx}] if why_no_mx else []
        asked.json.write_text(json.dumps([*map(asdict, bars), *skipped], indent=1))
    if asked.tiny:
        sys.stdout.write("".join(f"{bar.what}: {bar.figure}; {bar.peer}\n" for bar in bars))
        return 0
    notes = NOTES.format(samples=asked.samples, seq_len=asked.seq_len, peak=(peak or 0.0) / 1e12)
    write_section("trainer gpu", f"{TITLE}, {name}", bars, notes)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
