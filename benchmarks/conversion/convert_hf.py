"""Conversion beside torchtitan's method (load all, permute, DCP's Hugging Face writer) and a plain byte copy.

    python benchmarks/conversion/convert_hf.py [--mib 513] [--rounds 3] [--dir DIR]

Every case runs in its own process and reports the operation's seconds (imports excluded) and its peak RSS.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.paths import ROOT
from tools.report import TAKEN_NOTE, Measurement, interleave, median, spread, take_memory, timed, write_section

LAYOUTS = {"1 rank": "one", "4 ranks by rows": "rows", "4 ranks by columns": "columns"}
BASE_MIB = 270
NOTES = """The copy of the bytes is `shutil.copyfile` and an fsync for each file; it reads no digest and moves no row.
It leaves all writing to its fsync, while our store has the disk write what is there as more comes, so that ours can be quicker:
the last row of each layout is a copy that does the same.
"""
# Memory and page cache a case needs, in multiples of the model size, where more than its output.
TAKEN = {"torchtitan": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's size."""

    dim: int
    ffn: int
    layers: int
    vocab: int


SHAPES = {513: Shape(1024, 2816, 5, 33_200), 2460: Shape(2048, 5632, 9, 47_200)}


def make_model(folder: Path, shape: Shape) -> None:
    """A Hugging Face model of random fp32 weights."""
    import torch

    from titan_ckpt.converters.hf.config import encode_config, hf_config
    from titan_ckpt.converters.hf.safetensors_header import encode_header
    from titan_ckpt.converters.models.families import expected_tensors
    from titan_ckpt.converters.models.spec import ModelSpec

    spec = ModelSpec(
        family="llama", vocab_size=shape.vocab, dim=shape.dim, n_layers=shape.layers, n_heads=shape.dim // 64,
        n_kv_heads=shape.dim // 64, head_dim=64, ffn_dim=shape.ffn, norm_eps=1e-5, rope_theta=1e4, max_seq_len=2048,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(encode_config(hf_config(spec, base=None, dtype="float32")))
    tensors = expected_tensors(spec)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header([(name, "float32", size) for name, size in tensors.items()], {"format": "pt"}))
        for size in tensors.values():
            file.write(torch.randn(size).numpy().data)


def make_runs(folder: Path) -> None:
    """The model as checkpoints with torchtitan's names: one rank, four ranks by rows, four ranks by columns."""
    from titan_ckpt.checkpoint.open import open_checkpoint
    from titan_ckpt.converters import import_hf
    from titan_ckpt.resharding.placement_rules import PlacementRule
    from titan_ckpt.resharding.reshard import plan_reshard, run_plan
    from titan_ckpt.sharding.mesh import MeshSpec
    from titan_ckpt.sharding.placement import Shard

    import_hf(str(folder / "model"), str(folder / "one"), layout="torchtitan")
    columns = (PlacementRule("*norm*", {}), PlacementRule("*", {"dp_shard": Shard(1)}))
    for name, rules in (("rows", (PlacementRule("*", {"dp_shard": Shard(0)}),)), ("columns", columns)):
        plan = plan_reshard(open_checkpoint(str(folder / "one")), MeshSpec.parse("dp_shard=4"), rules=rules)
        run_plan(plan, str(folder / name))


def ours(run: str, out: str) -> Callable[[], object]:
    """Our export."""
    from titan_ckpt.converters.hf.export_run import export_hf

    return lambda: export_hf(run, out)


def ours_in(model: str, out: str) -> Callable[[], object]:
    """Our import."""
    from titan_ckpt.converters.hf.import_run import import_hf

    return lambda: import_hf(model, out)


def torchtitan_way(run: str, out: str) -> Callable[[], object]:
    """What torchtitan's convert_to_hf does: an empty state dict, dcp.load, rename and permute, DCP's Hugging Face writer."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    from titan_ckpt.checkpoint.open import open_checkpoint
    from titan_ckpt.converters.models.families import expected_tensors
    from titan_ckpt.converters.models.spec import spec_of
    from titan_ckpt.converters.models.tensor_names import LAYOUTS as NAMES
    from titan_ckpt.converters.models.tensor_names import name_in

    checkpoint = open_checkpoint(run)
    spec = spec_of(checkpoint.manifest.config, run)
    named = [name_in(NAMES["torchtitan"], name, spec) for name in expected_tensors(spec)]
    shapes = {fqn: entry.global_shape for fqn, entry in checkpoint.manifest.by_fqn.items()}

    def convert() -> None:
        state = {item.ours: torch.empty(shapes[item.ours]) for item in named}
        dcp.load(state, checkpoint_id=f"{run}/step-00000000")
        exported = {}
        for item in named:
            value = state[item.ours]
            if item.transform:
                value = value.view(-1, 32, 2, value.shape[1]).transpose(1, 2).reshape(value.shape).clone()
            exported[item.hf] = value
        writer = HuggingFaceStorageWriter(out, save_distributed=True, enable_consolidation=True)
        dcp.save(exported, storage_writer=writer)

    return convert


def data_files(source: str) -> list[Path]:
    """The tensor files of a run or a model."""
    return sorted(Path(source).rglob("*.distcp")) or sorted(Path(source).glob("*.safetensors"))


def copy(run: str, out: str) -> Callable[[], object]:
    """The same bytes, copied by the kernel and fsynced."""

    def plain() -> None:
        os.makedirs(out)
        for number, path in enumerate(data_files(run)):
            target = f"{out}/{number}"
            shutil.copyfile(path, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())

    return plain


def eager_copy(run: str, out: str) -> Callable[[], object]:
    """The same copy, flushed to disk every 16 MiB."""
    step = 16 << 20

    def eager() -> None:
        os.makedirs(out)
        for number, path in enumerate(data_files(run)):
            with path.open("rb") as source, open(f"{out}/{number}", "wb") as target:
                for start in range(0, path.stat().st_size, step):
                    count = os.sendfile(target.fileno(), source.fileno(), start, step)
                    os.posix_fadvise(target.fileno(), start, count, os.POSIX_FADV_DONTNEED)
                os.fsync(target.fileno())

    return eager


CASES: dict[str, Callable[[str, str], Callable[[], object]]] = {
    "ours": ours, "ours in": ours_in, "torchtitan": torchtitan_way, "copy": copy,
    "eager copy": eager_copy,
}  # fmt: skip


def child(case: str, source: str, out: str) -> None:
    """Run one case and print its seconds, those of the processor, and peak RSS in MiB."""
    warnings.simplefilter("ignore")
    action = CASES[case](source, out)
    size_bytes = sum(path.stat().st_size for path in data_files(source))
    take_memory(Path(out).parent, TAKEN.get(case, 1) * size_bytes)
    started = time.process_time()
    seconds = timed(action)
    processor_s = time.process_time() - started
    # Not ru_maxrss, which a child inherits from the process that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "processor_s": processor_s, "peak_mib": peak}) + "\n")


def once(case: str, source: Path, out: Path, keep: Callable[[float, float], None]) -> Callable[[], float]:
    """A function that runs one case in a process of its own and returns its seconds.

    `keep` gets the process's peak RSS in MiB, and its seconds of the processor.
    """

    def run() -> float:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        command = [sys.executable, __file__, "--child", case, str(source), str(out)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        facts = json.loads(done.stdout.splitlines()[-1])
        keep(facts["peak_mib"], facts["processor_s"])
        return float(facts["seconds"])

    return run


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, choices=list(SHAPES), default=513)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        measure(Path(folder), arguments.mib, arguments.rounds)


def measure(folder: Path, mib: int, rounds: int) -> None:
    """All cases on a model of `mib`."""
    make_model(folder / "model", SHAPES[mib])
    make_runs(folder)
    peaks: dict[str, float] = {}

    def run(name: str, case: str, source: str) -> Callable[[], float]:
        def keep(peak_mib: float, _processor_s: float) -> None:
            peaks[name] = max(peaks.get(name, 0.0), peak_mib)

        return once(case, folder / source, folder / "out", keep)

    cases = {
        "import": run("import", "ours in", "model"),
        "copy of the model": run("copy of the model", "copy", "model"),
    }
    for title, source in LAYOUTS.items():
        for case in ("ours", "torchtitan", "copy", "eager copy"):
            cases[f"{case}, {title}"] = run(f"{case}, {title}", case, source)
    seconds = interleave(cases, rounds=rounds)
    largest_mib = SHAPES[mib].dim * SHAPES[mib].vocab * 4 / (1 << 20)
    bars = [bar for title in LAYOUTS for bar in _bars(title, seconds, peaks, largest_mib)]
    share = median(seconds["import"]) / median(seconds["copy of the model"])
    bars.append(
        Measurement(
            what="import / copy of the bytes",
            figure=f"{share:.2f} ({spread(seconds['import'])}, {peaks['import']:.0f} MiB)",
            bar="1.3",
            holds=share <= 1.3,
        )
    )
    title = f"Conversion to and from Hugging Face, {mib} MiB in fp32, q and k permuted"
    taken = "The torchtitan way, which holds the model in memory, is counted as taking twice what it reads, the others as much.\n"
    write_section(f"convert {mib}", title, bars, f"{NOTES}{TAKEN_NOTE}\n{taken}")


def _bars(
    title: str, seconds: dict[str, list[float]], peaks: dict[str, float], largest_mib: float
) -> list[Measurement]:
    mine, theirs, plain = (seconds[f"{case}, {title}"] for case in ("ours", "torchtitan", "copy"))
    eager = seconds[f"eager copy, {title}"]
    peak, most = peaks[f"ours, {title}"], BASE_MIB + 2.5 * largest_mib
    against_peer, against_copy = median(mine) / median(theirs), median(mine) / median(plain)
    bars = [
        Measurement(
            what=f"export, {title}: time / the torchtitan way",
            figure=f"{against_peer:.2f} ({spread(mine)})",
            bar="0.4",
            holds=against_peer <= 0.4,
            peer=spread(theirs),
        ),
        Measurement(
            what=f"export, {title}: peak RSS",
            figure=f"{peak:.0f} MiB",
            bar=f"{most:.0f} MiB",
            holds=peak <= most,
            peer=f"{peaks[f'torchtitan, {title}']:.0f} MiB",
        ),
    ]
    by_columns = "columns" in title
    return bars + [
        Measurement(
            what=f"export, {title}: time / copy of the bytes",
            figure=f"{against_copy:.2f}",
            bar="-" if by_columns else "1.3",
            holds=by_columns or against_copy <= 1.3,
            peer=spread(plain),
        ),
        Measurement(
            what=f"export, {title}: time / a copy that writes as it reads",
            figure=f"{median(mine) / median(eager):.2f}",
            bar="-",
            holds=True,
            peer=spread(eager),
        ),
    ]


if __name__ == "__main__":
    main()
