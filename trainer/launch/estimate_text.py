"""The estimate as text, and as the record of `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.trainer.launch.estimate import OURS, Memory, State, TrainingEstimate
from titan_ckpt.trainer.launch.gpus import GIB
from titan_ckpt.trainer.launch.published import Comparison
from titan_ckpt.trainer.launch.save_schedule import SaveSchedule


def format_estimate(found: TrainingEstimate, saves: SaveSchedule, row: Comparison | None) -> str:
    """The estimate as text; `row`: the published row of this config, if it has one."""
    lines = [
        f"mesh {found.mesh}: {found.mesh.world_size} ranks, {found.num_parameters / 1e9:.3f} B parameters{_trained(found)}", "",
        *_memory(found.memory),
        *(_host(found.host) if found.host.total else []),
        "", "collectives of a rank per step, with the bytes that it sends",
    ]  # fmt: skip
    lines += [f"  {t.name:<34}{t.calls:>8} calls  {format_size(t.size_bytes):>10}" for t in found.traffic] or ["  none"]
    rank_h = saves.failure_every_s * found.mesh.world_size / 3600
    lines += [
        "", "checkpoints",
        f"  size: {format_size(found.checkpoint_bytes)}, {format_size(found.checkpoint_bytes_per_rank)} per rank",
        f"  a save stops training for {format_duration(saves.stall_s)} and uploads for {format_duration(saves.upload_s)}",
        f"  a failure every {format_duration(saves.failure_every_s)} ({rank_h:g} h per rank): "
        f"save every {format_duration(saves.save_every_s)}",
        *(_published(row) if row is not None else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _trained(found: TrainingEstimate) -> str:
    """How many of them are trained, if there are adapters; these are beside the model's."""
    return "" if found.num_trained == found.num_parameters else f", {found.num_trained / 1e6:.2f} M trained in adapters"


def _memory(memory: Memory) -> list[str]:
    """The parts of the peak, which add up to it, and what the other moment comes to."""
    moments, peak = memory.moments(), memory.peak_moment
    lines = [f"device memory of the rank that needs most, at the peak of a step, which is in {peak}"]
    lines += [_size(name, size) for name, size in moments[peak].items()] + [_size("peak, their sum", memory.total)]
    for moment in moments.keys() - {peak}:
        parts = moments[moment]
        own = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if name not in moments[peak])
        lines.append(f"  in {moment} {sum(parts.values()) / GIB:.2f} GiB, with {own} instead")
    return lines


def _host(host: State) -> list[str]:
    """What `mesh.cpu_offload` keeps off the device."""
    parts = {"parameters": host.parameters, "gradients": host.gradients, "optimizer": host.optimizer}
    sizes = [_size(name, size) for name, size in parts.items()]
    return ["", "host memory of a rank, with mesh.cpu_offload", *sizes, _size("their sum", host.total)]


def _size(name: str, size_bytes: float) -> str:
    return f"  {name:<34}{size_bytes / GIB:>10.2f} GiB"


def _published(row: Comparison) -> list[str]:
    """The row of docs/performance.md."""
    there = row.published
    lines = [
        "",
        f"with torchtitan's loss, {there.implementation.logit_bytes:g} bytes per logit (ours {OURS.logit_bytes:g}), and keys and "
        "values of all heads over cp,",
        "beside the figures that torchtitan publishes",
    ]
    if there.memory_gib is not None:
        off = row.peak_bytes / GIB / there.memory_gib - 1
        lines.append(
            f"  {'peak':<34}{row.peak_bytes / GIB:>10.2f} GiB  published {there.memory_gib:.2f}, {off:+.1%} off"
        )
    off = row.tokens_per_s / there.tokens_per_s - 1
    lines.append(
        f"  {'tokens per second and GPU':<34}{row.tokens_per_s:>10,.5g}      published {there.tokens_per_s:,.6g}, {off:+.1%} off"
    )
    return lines


def estimate_facts(found: TrainingEstimate, saves: SaveSchedule, row: Comparison | None) -> dict[str, Any]:
    """The record of `--json`; bytes and seconds."""
    memory = found.memory
    facts = asdict(found) | {
        "mesh": str(found.mesh), "peak_bytes": memory.total, "peak_moment": memory.peak_moment,
        "peak_parts": memory.moments()[memory.peak_moment], "host_bytes": found.host.total, "saves": asdict(saves),
    }  # fmt: skip
    return facts if row is None else facts | {"published": row.facts()}
