"""Run a program under torchrun and keep what a user would have of it, in several forms.

`live`: the recorder's folder, collected while it hung. `after`: the recorder's folder, logs and console once all was over.
`logs`: torchrun's log folder and console alone. `boxes`: of `after` the black boxes and the logs. `no_logs`: the recorder's
folder alone. `plain` and `detail`: torchrun's log folder and console of a run without our recorder, `detail` with
TORCH_DISTRIBUTED_DEBUG=DETAIL (torch 2.13 crashes there in DDP's constructor over gloo, on all ranks).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from titan_ckpt.debug.live.collect import collect
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.demo.ports import free_port
from titan_ckpt.demo.processes import process_tree, send_signal
from titan_ckpt.errors import TitanError
from tools.hangs.incident import Incident
from tools.hangs.rank import FOLDER, STALL_S, TIMEOUT_S
from tools.processes import marked_processes

FORMS = ("live", "after", "logs", "boxes", "no_logs", "plain", "detail")
WITHOUT_RECORDER: Mapping[str, Mapping[str, str]] = {"plain": {}, "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}
PLAIN_TIMEOUT_S = 12.0
OPERATION_TIMEOUT_S, RECORDED_STALL_S, HEALTHY_STALL_S = 45.0, 6.0, 15.0
BEGIN_S, SETTLE_S, END_S = 240.0, 40.0, 90.0


def start(incident: Incident, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun, with the console in `console.log`, a folder of logs `tr` and the recorder's `rec`."""
    stall_s = HEALTHY_STALL_S if incident.is_healthy else RECORDED_STALL_S
    return _launch(incident, folder, {STALL_S: str(stall_s), TIMEOUT_S: str(OPERATION_TIMEOUT_S), **environment()})


def _launch(incident: Incident, folder: Path, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    (folder / "rec").mkdir(parents=True)
    store = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(incident.ranks), *store,
        "--max-restarts", str(incident.restarts), "--log-dir", str(folder / "tr"), "--redirects", "3", "--tee", "3",
        "-m", "tools.hangs.rank", incident.name,
    ]  # fmt: skip
    mine = {FOLDER: str(folder / "rec"), **settings}
    if (
        incident.restarts
    ):  # else gloo may find addresses of the attempt before in the launcher's store, and the job fails of that
        mine["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    variables = {**os.environ, **mine, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with open(folder / "console.log", "wb") as console:
        return subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )


def gather(incident: Incident, folder: Path) -> list[str]:
    """Run it until it is over; the forms of evidence that it left under `folder`."""
    job = start(incident, folder)
    try:
        _wait_until_begun(incident, folder, job)
        if incident.end:
            _wait_until(lambda: False, job, 5.0)
            job.send_signal(signal.Signals[incident.end])
        elif _hangs(incident, folder, job):
            collect(folder / "rec", wait_s=8.0)
            shutil.copytree(folder / "rec", folder / "live", ignore=shutil.ignore_patterns("*.sock", "*.ask"))
        if not _wait_until(lambda: False, job, END_S):
            job.send_signal(signal.SIGTERM)
            _wait_until(lambda: False, job, 60.0)
    except TitanError:
        pass  # nothing live could be collected: the other forms remain
    finally:
        end(job, folder)
    return _forms(folder)


def gather_logs(incident: Incident, folder: Path, form: str) -> None:
    """Run it without our recorder, `plain` or with torch's `detail`; its log folder and console."""
    job = _launch(incident, folder / "run", {TIMEOUT_S: str(PLAIN_TIMEOUT_S), **WITHOUT_RECORDER[form]})
    try:
        if not _wait_until(lambda: False, job, END_S + PLAIN_TIMEOUT_S):
            job.send_signal(signal.SIGTERM)
            _wait_until(lambda: False, job, 60.0)
    finally:
        end(job, folder / "run")
    shutil.copytree(folder / "run" / "tr", folder / form / "tr")
    shutil.copy(folder / "run" / "console.log", folder / form)


def _forms(folder: Path) -> list[str]:
    """Sort what is there into the forms."""
    sockets = shutil.ignore_patterns("*.sock", "*.ask")
    for form in ("after", "logs", "boxes", "no_logs"):
        (folder / form).mkdir()
        if form != "no_logs":
            shutil.copytree(folder / "tr", folder / form / "tr", dirs_exist_ok=True)
            shutil.copy(folder / "console.log", folder / form)
    shutil.copytree(folder / "rec", folder / "after" / "rec", ignore=sockets)
    shutil.copytree(folder / "rec", folder / "no_logs" / "rec", ignore=sockets)
    stacks = shutil.ignore_patterns("*.sock", "*.ask", "*.stacks", "*.pickle", "*.error.json")
    shutil.copytree(folder / "rec", folder / "boxes" / "rec", ignore=stacks)
    return [form for form in FORMS if (folder / form).is_dir()]


def _wait_until_begun(incident: Incident, folder: Path, job: subprocess.Popen[bytes]) -> None:
    """Until all ranks of the last attempt are in the program, or the job is over."""
    names = [f"began-{incident.restarts}-{rank}" for rank in range(incident.ranks)]
    _wait_until(lambda: all((folder / name).exists() for name in names), job, BEGIN_S if incident.joins else 20.0)


def _hangs(incident: Incident, folder: Path, job: subprocess.Popen[bytes]) -> bool:
    """Whether recorders report a stall before the job is over; some time is left for all of them to do so."""
    rec = folder / "rec"
    seen = _wait_until(lambda: any(rec.glob("*.stall.pickle")), job, SETTLE_S)
    if not seen or job.poll() is not None:
        return job.poll() is None
    every = [rec / f"rank_{rank:05d}.stall.stacks" for rank in range(incident.ranks)]
    _wait_until(lambda: all(path.exists() for path in every), job, 10.0)
    return job.poll() is None


def _wait_until(condition: Callable[[], bool], job: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it came true, or the job ended, within that time."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if condition() or job.poll() is not None:
            return True
        time.sleep(0.2)
    return False


def end(job: subprocess.Popen[bytes], folder: Path) -> None:
    """End the processes that `start` began, stopped and orphaned ones too."""
    send_signal(process_tree(job))
    job.wait()
    send_signal(marked_processes(f"{FOLDER}={folder / 'rec'}", -1))
