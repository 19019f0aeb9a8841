"""How jobs ended, by what cluster managers and launchers other than torchrun say: LSF, PBS, Slurm's accounting, Kubernetes, cloud
services, Ray, DeepSpeed. They know hosts, pods and processes, rarely ranks.

Sources: IBM's "Termination reasons displayed by bacct, bhist, and bjobs", bsub's job report, jsrun's message as quoted by its
users; the PBS Professional and TORQUE guides (`=>> PBS: job killed: ...`); Slurm's manual pages sacct(1) and scontrol(1);
`kubectl get events` (kubelet's pkg/kubelet/events); Vertex AI's and SageMaker's troubleshooting pages; Ray's src/ray/raylet
(node_manager.cc, worker_killing_policy); the manuals of docker and compose; deepspeed/launcher/launch.py (`sigkill_handler`);
horovod/runner/gloo_run.py; Open MPI's orte/mca/errmgr (help-errmgr-base.txt, `node-died`); SkyPilot's
sky/backends/task_codegen.py; systemd's src/core/service.c and unit.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, Signals

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.read.text.messages import NO_DIGITS, without
from titan_ckpt.debug.read.text.prefixes import Line
from titan_ckpt.debug.read.text.schedulers.shells import PLACES, in_english


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a line says of an end, or which process a launcher ended; `text` is that line, where it was an earlier one."""

    text: str = ""
    kind: EventKind | None = None
    told_pid: int | None = None
    task: int | None = None  # which of the launcher's processes ended, with `code`
    code: int = 0
    is_first: bool = False
    shell: str = ""  # a line of bash, in English
    values: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Managers:
    """What is remembered from line to line."""

    _states: dict[str, EventKind] = field(default_factory=dict)  # that the table of jobs may hold whose head was read
    _actor: str = ""
    _first: int | None = None  # which horovodrun names, its code on the next line
    _joined: dict[str, set[int]] = field(default_factory=dict)  # a store's key -> the ranks that added it
    _reached: tuple[int, int] | None = None  # how many of JAX's tasks came to a barrier, of how many
    _first_task: int | None = None  # of these
    _lost_tasks: list[int] | None = None  # of JAX, as they are listed
    _actor_lines: int = 0  # lines that may still tell which actor of Ray died

    def take(self, line: Line) -> Iterator[Said]:
        """What a line says, if anything."""
        text = line.text[:4000]
        if self._actor_lines:
            self._actor_lines -= 1
            yield from self.ray(text, line)
            return
        if not self._states and _is_plain(text.translate(NO_DIGITS)):
            return
        for words, take in _RULES:
            if any(word in text for word in words) or (self._states and take is Managers.table):
                yield from take(self, text, line)

    def first(self, text: str, _line: Line) -> Iterator[Said]:
        """The process that ended first, as jsrun and horovodrun say it; horovodrun also gives the codes of all."""
        if match := _JSRUN.search(text):
            yield Said(task=int(match["task"]), code=-int(match["signal"]), is_first=True)
        elif match := _HOROVOD.match(text):
            yield Said(task=int(match["task"]), code=_of_shell(int(match["code"])))
        elif match := _HOROVOD_NAME.match(text):
            self._first = int(match["task"])
        elif self._first is not None and (match := _HOROVOD_CODE.match(text)):
            yield Said(task=self._first, code=_of_shell(int(match["code"])), is_first=True)
            self._first = None

    def unit(self, text: str, _line: Line) -> Iterator[Said]:
        """systemd of an instance of a template, `train@3.service`, whose processes' lines have the host `train-3`."""
        if (match := _UNIT.search(text)) and (match["oom"] or match["signal"] not in ("1", "2", "15")):
            values = {"host": f"{match['name']}-{match['instance']}", **({"cause": "oom"} if match["oom"] else {})}
            yield Said(kind=EventKind.KILLED, values=values)

    def shell(self, text: str, _line: Line) -> Iterator[Said]:
        """A line of bash in another language."""
        if english := in_english(text):
            yield Said(shell=english)

    def barrier(self, text: str, _line: Line) -> Iterator[Said]:
        """The one rank that had not come to torch's barrier in the store, where all that had are named."""
        if match := _ADDED.search(text):
            self._joined.setdefault(match["key"], set()).add(int(match["rank"]))
        elif match := _BARRIER.search(text):
            joined, size = self._joined.get(match["key"], set()), int(match["size"])
            missing = {*range(size)} - joined if size <= MOST_JOINED else set()
            if len(missing) == 1 and len(joined) == int(match["joined"]) == size - 1:
                yield _awaited(int(match["rank"]), missing.pop(), size)

    def jax(self, text: str, _line: Line) -> Iterator[Said]:
        """The one task that JAX's coordination service lost, or that alone had not come to its barrier."""
        if match := _JAX_REACHED.search(text):
            self._reached = (int(match["joined"]), int(match["size"]))
        elif match := _JAX_FIRST.search(text):
            self._first_task = int(match["task"])
        elif "are unhealthy (stopped sending heartbeats)" in text:
            self._lost_tasks = []
        elif self._lost_tasks is not None and (match := _JAX_TASK.match(text)):
            self._lost_tasks.append(int(match["task"]))
        elif self._lost_tasks is not None and "tasks have crashed" in text:
            lost, self._lost_tasks = self._lost_tasks, None
            if len(lost) == 1:
                yield Said(kind=EventKind.EXITED, values={"rank": str(lost[0]), "is_lost": "1"})
        elif self._reached is not None and self._first_task is not None and (match := _JAX_TASK.match(text)):
            (joined, size), first, self._reached = self._reached, self._first_task, None
            if joined == size - 1 and int(match["task"]) != first:
                yield _awaited(first, int(match["task"]), size)

    def daemon(self, text: str, _line: Line) -> Iterator[Said]:
        """The host of which Open MPI lost its daemon."""
        if match := _DAEMON.search(text):
            yield Said(kind=EventKind.NODE_LOST, values={"host": match["host"]})

    def deepspeed(self, text: str, line: Line) -> Iterator[Said]:
        """`[launch.py:341:sigkill_handler] ['python', 'train.py', '--local_rank=3'] exits with return code = -9`: the code of the
        process that ended first, behind the command of the one that was started last."""
        if match := _DEEPSPEED.search(text):
            yield _of_host(line.host, int(match["code"]))
        elif match := _KILLING.search(text):
            yield Said(told_pid=int(match["pid"]))

    def launcher(self, text: str, _line: Line) -> Iterator[Said]:
        """A rank of ours that ended because its launcher did."""
        if _LAUNCHER_GONE.search(text):
            yield Said(kind=EventKind.CANCELLED, values={"cause": "launcher"})

    def lsf(self, text: str, _line: Line) -> Iterator[Said]:
        """The reason in a job's report."""
        if match := _LSF.search(text):
            yield Said(
                kind=_LSF_REASONS.get(match["reason"], EventKind.CANCELLED), values=_oom_if("MEM", match["reason"])
            )

    def pbs(self, text: str, _line: Line) -> Iterator[Said]:
        """A limit, or a node that is gone."""
        if match := _PBS_NODE.search(text):
            yield Said(kind=EventKind.NODE_LOST, values={"host": match["host"]})
        elif match := _PBS_LIMIT.search(text):
            is_time = match["what"] in ("walltime", "cput")
            yield Said(
                kind=EventKind.TIME_LIMIT if is_time else EventKind.KILLED, values={} if is_time else {"cause": "oom"}
            )

    def table(self, text: str, _line: Line) -> Iterator[Said]:
        """`sacct`, `squeue` and `scontrol show job`: states of whole jobs and steps, whichever columns were asked for."""
        columns = [name for name in _COLUMNS if name in text]
        if len(columns) > 1:
            self._states = {**_STATES, **(_SHORT_STATES if _SHORT in columns else {})}
        elif match := _SCONTROL.search(text):
            yield from _of_state(match["state"], _STATES)
        elif self._states:
            parts = [part.rstrip("+") for part in re.split(r"[| \t]+", text[:1000].strip())]
            is_row = parts[0][:1].isdigit() or any(map(_EXIT_CODE.fullmatch, parts))
            states = [part for part in parts if any(_of_state(part, self._states))] if is_row else []
            yield from _of_state(states[0], self._states) if states else ()
            if not is_row and parts[0].strip("-"):
                self._states = {}

    def event(self, text: str, _line: Line) -> Iterator[Said]:
        """A line of `kubectl get events`."""
        if match := _EVENT.search(text):
            values = {"host": match["object"], **({"cause": "evicted"} if match["why"] == "Evicted" else {})}
            yield Said(kind=_EVENTS[match["why"]], values=values)

    def replica(self, text: str, _line: Line) -> Iterator[Said]:
        """Vertex AI, SageMaker and SkyPilot: codes of hosts or of the whole job."""
        if match := _REPLICA.search(text):
            yield _of_host(match["host"], int(match["code"]))
        elif match := _SAGEMAKER.search(text):
            yield _of_host("", int(match["code"]))
        elif match := _CODES.search(text):
            for number, code in enumerate(re.findall(r"-?\d{1,4}", match["codes"])[:10_000]):
                if int(code):
                    yield _of_host(f"node {number}", int(code))

    def ray(self, text: str, line: Line) -> Iterator[Said]:
        """A worker that a node's memory monitor or something unknown killed."""
        if match := _RAY_OOM.search(text):
            yield Said(kind=EventKind.KILLED, values={"pid": match["pid"], "cause": "oom"})
        elif match := _RAY_DIED.search(text):
            yield Said(kind=EventKind.EXITED, values={"pid": match["pid"], "host": line.host, "is_lost": "1"})
        elif "died unexpectedly before" in text:
            self._actor, self._actor_lines = text.strip(), MOST_ACTOR_LINES
        elif match := _RAY_FIELD.match(text):
            self._actor_lines = 0
            values = {"pid": match["pid"], "is_lost": "1"}
            yield Said(kind=EventKind.EXITED, text=f"{self._actor} (pid {match['pid']})", values=values)

    def docker(self, text: str, _line: Line) -> Iterator[Said]:
        """A row of `docker ps -a`, and what compose says of a service."""
        match = _DOCKER_PS.search(text) or _COMPOSE.match(text)
        if match and int(match["code"]):
            yield _of_host(match["host"], int(match["code"]))

    def job(self, text: str, _line: Line) -> Iterator[Said]:
        """What AWS Batch, Kubeflow and Azure Machine Learning say of a job as a whole."""
        if _JOB_FAILED.search(text):
            yield Said(kind=EventKind.EXITED, text=text.strip())

    def vllm(self, text: str, _line: Line) -> Iterator[Said]:
        """A worker's process that its executor found dead (v1/executor/multiproc_executor.py)."""
        if match := _VLLM_DIED.search(text):
            yield Said(kind=EventKind.KILLED, values={"rank": match["rank"]})


def _awaited(waiting: int, missing: int, size: int) -> Said:
    """A rank that waited for another one to come to the start of a job."""
    values = {"rank": str(waiting), "awaited": str(missing), "expected": str(size)}
    return Said(kind=EventKind.STORE_WAIT, values=values)


def _of_shell(code: int) -> int:
    """A code that may have passed through a shell, which gives a signal as 128 more."""
    return 128 - code if code - 128 in set(Signals) else code


def _of_host(host: str, code: int) -> Said:
    """The exit code of a host's process."""
    signal = -code if code < 0 else code - 128 if code > 128 else 0
    name = Signals(signal).name if signal in set(Signals) else ""
    kind = EventKind.KILLED if signal == SIGKILL else EventKind.EXITED
    return Said(kind=kind, values={"host": host, "signal": name})


def _of_state(state: str, states: Mapping[str, EventKind]) -> Iterator[Said]:
    """What a job's state means, if it did not end well: whole, or as far as the column is wide."""
    is_short = state in _SHORT_STATES and state in states
    if kind := next(
        (kind for name, kind in states.items() if state == name or (not is_short and state.startswith(name))), None
    ):
        yield Said(kind=kind, values={"cause": "oom"} if state[:3] in ("OUT", "OOM") else {})


def _oom_if(word: str, text: str) -> dict[str, str]:
    return {"cause": "oom"} if word in text else {}


_UNIT = re.compile(
    r"(?P<name>[\w.-]{1,60})@(?P<instance>\d{1,6})\.service: (?:(?P<oom>A process of this unit has been killed by the OOM killer"
    r"|Failed with result 'oom-kill')|Main process exited, code=(?:killed|dumped), status=(?P<signal>\d{1,2})/)"
)
_DAEMON = re.compile(r"Remote daemon: \[\[\d{1,9},\d{1,9}\],\d{1,9}\] on node (?P<host>[\w.-]{1,80})\s*$")
MOST_JOINED = 65_536
_ADDED = re.compile(r"Added key: (?P<key>\S{1,200}) to store for rank: (?P<rank>\d{1,6})\b")
_BARRIER = re.compile(
    r"in store based barrier .{0,60}?rank:? (?P<rank>\d{1,6}),(?: for)? key: (?P<key>\S{1,200}) \(world_size=(?P<size>\d{1,6}), "
    r"(?:worker_count|num_workers_joined)=(?P<joined>\d{1,6})"
)
_JAX_TASK = re.compile(r"/job:\w{1,40}/replica:\d{1,6}/task:(?P<task>\d{1,6})\s*$")
_JAX_REACHED = re.compile(r"# of tasks that reached the barrier: (?P<joined>\d{1,6})/(?P<size>\d{1,6})\.")
_JAX_FIRST = re.compile(r"The first task at the barrier: /job:\w{1,40}/replica:\d{1,6}/task:(?P<task>\d{1,6})\.")
_JSRUN = re.compile(r"\(first noticed rank (?P<task>\d{1,6})\) terminated with signal (?P<signal>\d{1,2})\b")
_HOROVOD = re.compile(r"Process (?P<task>\d{1,6}) exit with status code (?P<code>\d{1,3})\.\s*$")
_HOROVOD_NAME = re.compile(r"Process name: (?P<task>\d{1,6})\s*$")
_HOROVOD_CODE = re.compile(r"Exit code: (?P<code>\d{1,3})\s*$")
_DEEPSPEED = re.compile(r"exits with return code = (?P<code>-?\d{1,4})\s*$")
_KILLING = re.compile(r"sigkill_handler\] Killing subprocess (?P<pid>\d{1,9})\b")
_LSF = re.compile(r"\bTERM_(?P<reason>[A-Z_]{3,30}): job killed")
_LSF_REASONS = {
    "MEMLIMIT": EventKind.KILLED, "RUNLIMIT": EventKind.TIME_LIMIT, "CPULIMIT": EventKind.TIME_LIMIT,
    "DEADLINE": EventKind.TIME_LIMIT, "PREEMPT": EventKind.PREEMPTED, "LOAD": EventKind.PREEMPTED,
    "REQUEUE_ADMIN": EventKind.PREEMPTED, "REQUEUE_OWNER": EventKind.PREEMPTED, "WINDOW": EventKind.PREEMPTED,
    "ZOMBIE": EventKind.NODE_LOST,
}  # fmt: skip
_PBS_NODE = re.compile(r"PBS: job killed: node \d{1,6} \((?P<host>[\w.-]{1,100})\) requested job")
_PBS_LIMIT = re.compile(r"PBS: job killed: (?P<what>\w{1,20}) \S{1,20} exceeded limit")
_SCONTROL = re.compile(r"\bJobState=(?P<state>[A-Z_]{4,20})\b")
_SHORT = " ST "  # squeue's column of short states
_COLUMNS = ("JobID", "JOBID", "JobName", "State", "STATE", "ExitCode", _SHORT, "Elapsed", "NODELIST")
_EXIT_CODE = re.compile(r"\d{1,3}:\d{1,3}")
_STATES = {
    "OUT_OF_ME": EventKind.KILLED, "NODE_FAIL": EventKind.NODE_LOST, "BOOT_FAIL": EventKind.NODE_LOST,
    "TIMEOUT": EventKind.TIME_LIMIT, "DEADLINE": EventKind.TIME_LIMIT, "PREEMPTED": EventKind.PREEMPTED,
    "CANCELLED": EventKind.CANCELLED, "FAILED": EventKind.EXITED,
}  # fmt: skip
_SHORT_STATES = {
    "TO": EventKind.TIME_LIMIT, "NF": EventKind.NODE_LOST, "OOM": EventKind.KILLED, "PR": EventKind.PREEMPTED,
    "CA": EventKind.CANCELLED, "F": EventKind.EXITED, "BF": EventKind.NODE_LOST, "DL": EventKind.TIME_LIMIT,
}  # fmt: skip
_EVENTS = {
    "Evicted": EventKind.KILLED, "NodeNotReady": EventKind.NODE_LOST, "NodeShutdown": EventKind.NODE_LOST,
    "Preempted": EventKind.PREEMPTED, "PreemptionByScheduler": EventKind.PREEMPTED,
    "DeadlineExceeded": EventKind.TIME_LIMIT, "TaintManagerEviction": EventKind.NODE_LOST,
}  # fmt: skip
_EVENT = re.compile(
    rf"\b(?:Warning|Normal) +(?P<why>{'|'.join(_EVENTS)}) +(?:pod|node|job)/(?P<object>[a-z0-9][a-z0-9.-]{{0,252}})"
)
_REPLICA = re.compile(
    r"[Tt]he replica (?P<host>[\w-]{1,60})(?: ran out-of-memory and)? exited with a non-zero status of (?P<code>\d{1,3})"
)
_SAGEMAKER = re.compile(r"(?:^|ExecuteUserScriptError.{0,40})\bExitCode:? (?P<code>-?\d{1,3})\b")
_CODES = re.compile(r"failed with return code list: ?(?:\x1b\[\w+)?\[(?P<codes>[-\d, ]{1,60000})\]")
_RAY_OOM = re.compile(r"Memory on the node \(IP: .{0,400}?\bpid=(?P<pid>\d{1,9})")
_VLLM_DIED = re.compile(r"Worker proc VllmWorker-(?P<rank>\d{1,6}) died unexpectedly")
_RAY_FIELD = re.compile(r"\s{1,8}pid: (?P<pid>\d{1,9})\s*$")
MOST_ACTOR_LINES = 6
_RAY_DIED = re.compile(r"[Aa] worker died or was killed.{0,600}?Worker PID: (?P<pid>\d{1,9})")

_JOB_FAILED = re.compile(
    r"^AWS Batch: job \S{1,200} is FAILED|Job \S{1,200} is failed because \d{1,6} \w{1,40} replica"
    r"|^AzureMLCompute job failed\b"
)
_LAUNCHER_GONE = re.compile(r"the launcher of this job \(process \d{1,9}\) is gone")  # trainer/launch/launch.py
_DOCKER_PS = re.compile(r"  Exited \((?P<code>\d{1,3})\) .{1,60}? ago\b.*\s(?P<host>[\w.-]{1,120})\s*$")
_COMPOSE = re.compile(r"(?P<host>[\w.-]{1,120}) exited with code (?P<code>\d{1,3})\s*$")

_RULES: tuple[tuple[tuple[str, ...], Callable[[Managers, str, Line], Iterator[Said]]], ...] = (
    (PLACES, Managers.shell),
    (("to store for rank: ", "in store based barrier"), Managers.barrier),
    (("reached the barrier", "first task at the barrier", "are unhealthy", "/task:", "tasks have crashed"), Managers.jax),
    (("Remote daemon: ",), Managers.daemon),
    (("AWS Batch: job ", "is failed because", "AzureMLCompute job failed"), Managers.job),
    ((".service: ",), Managers.unit),
    (("first noticed rank", "exit with status code", "Process name: ", "Exit code: "), Managers.first),
    (("return code = ", "Killing subprocess"), Managers.deepspeed),
    (("launcher of this job (",), Managers.launcher),
    (("TERM_",), Managers.lsf),
    (("PBS: job killed",), Managers.pbs),
    (("JobID", "JOBID", "ExitCode", "JobState="), Managers.table),
    (("pod/", "node/", "job/"), Managers.event),
    (("The replica", "the replica", "ExecuteUserScriptError", "ExitCode ", "return code list"), Managers.replica),
    (("Memory on the node", "worker died or was killed", "died unexpectedly before"), Managers.ray),
    (("Worker proc VllmWorker-",), Managers.vllm),
    (("Exited (", " exited with code "), Managers.docker),
)  # fmt: skip
_is_plain = without(tuple(word for words, _ in _RULES for word in words))
