"""How processes ended, by what launchers, schedulers, shells and kernels say of them.

Sources: torch/distributed/elastic/multiprocessing (api.py, errors/__init__.py; 1.9 to 2.13) and torch/multiprocessing/spawn.py;
Slurm's src/srun/libsrun and slurmstepd; Open MPI's help-prte-runtime and help-mpi-api texts, MPICH's MPI_Abort, Hydra's pmiserv,
Intel MPI, HPE's PALS (pmodels/mpich, issue 7569); DeepSpeed's launcher/launch.py; Lightning's process observer; composer's
cli/launcher.py; kubelet's events, `kubectl get pods` and `kubectl describe pod`; bash's job messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from signal import Signals

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.read.text.clocks import seconds
from titan_ckpt.debug.read.text.prefixes import Line
from titan_ckpt.debug.read.text.schedulers.host_lists import one_host, ranges
from titan_ckpt.debug.read.text.schedulers.last_lines import LastCode, calls_it_good, of_rank
from titan_ckpt.debug.read.text.schedulers.managers import Managers, Said
from titan_ckpt.debug.read.text.schedulers.mpi import HYDRA, HYDRA_SIGNAL, MPI_ABORT, MPI_CODE, MPI_NAME, MPIRUN, PALS
from titan_ckpt.debug.read.text.schedulers.nodes import OF_NODES, Node
from titan_ckpt.debug.read.text.schedulers.pods import PodDescription
from titan_ckpt.debug.read.text.schedulers.process_ends import Ending, Note, signal_number
from titan_ckpt.debug.read.text.schedulers.slurm import CANCELLED, NODE_LOST, TASKS, WHY, WORD, WORDS


@dataclass(slots=True)
class Endings:
    """What one file says of endings, line by line."""

    found: list[Ending] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)  # pid -> signals of the launcher, as exit codes
    unmoved: set[int] = field(default_factory=set)  # pids that were still there PATIENCE_S after a signal
    is_elastic: bool = False
    is_torchrun: bool = False  # or torchrun's own lines, before it starts an agent
    has_finished: bool = False  # torchrun's agent met the others at the end: its own workers ended with 0
    is_called_good: bool = False  # by a scheduler or a service, by torchrun of this host's workers alone, or by a shell
    has_launcher: bool = False  # a launcher of several ranks is named
    attempts: int = 0
    code: int | None = None
    over_line: int = 0  # that said so, or that the agents met
    node: Node = field(default_factory=Node)  # of the launcher that writes here
    is_over: bool = False  # torchrun ended, with a table of its workers' ends
    has_steps: bool = False  # of this attempt
    spawned: dict[int, int] = field(default_factory=dict)  # pid -> local rank, where a launcher names both
    tasks: list[tuple[str, str]] = field(default_factory=list)  # hosts and their tasks, as srun lists them
    pod: PodDescription = field(default_factory=PodDescription)
    _late: list[Ending] = field(default_factory=list)
    _cleaned: list[Ending] = field(default_factory=list)
    _is_cancelled: bool = False
    unsaid_line: int = 0  # up to which all is of an earlier attempt, as a later line shows
    has_failed: bool = False  # the launcher reported a failed worker since the last restart
    _agent: str = ""  # which reported it
    _failed_s: float | None = None  # and when
    _first: bool = False
    _has_observer: bool = False
    _rank: tuple[int, int] | None = None
    _time_s: float | None = None
    _spawned: int | None = None
    _told_s: dict[int, float | None] = field(default_factory=dict)
    _managers: Managers = field(default_factory=Managers)
    _last: LastCode = field(default_factory=LastCode)

    def take(self, number: int, line: Line) -> bool:
        """Account for one line; True if a new attempt of the job begins with it."""
        text = line.text[:1000]
        self.has_launcher = self.has_launcher or any(name in text for name in _LAUNCHERS)
        if any(word in text for word in OF_NODES):
            self.node.take(text, self.attempts)
        if "srun: " in text or "slurm" in text or "yhrun: " in text:
            self._slurm(number, text)
        if any(word in text for word in _OF_AGENTS):
            self._elastic(number, text, line)
        if "rocess" in text or "RANK" in text or "xit code" in text or "KILLED" in text or "rank " in text:
            self._mpi(number, text)
            self._spawn(number, text)
        if "MPI_A" in text and (match := MPI_ABORT.search(text)):
            rank = int(match["rank"] or match["other"])
            self.found.append(Ending(code=int(match["code"] or 1), line=number, rank=rank, is_first=True))
        if len(text) < _LONGEST_END and (ended := of_rank(text, line.rank)) is not None:
            self.found.append(replace(ended, line=number))
        elif not self.pod.name and (code := self._last.take(text)) is not None:  # a pod's own code is no job's
            if line.rank is None:
                self.code, self.over_line, self.is_called_good = code, number, code == 0
            else:
                self.found.append(Ending(code=code, line=number, rank=line.rank))
        elif line.rank is None and calls_it_good(text):
            self.is_called_good, self.over_line = True, number
        said = list(self._managers.take(line))
        for one in said:
            self._say(number, line, one)
        if not said:
            self._kubernetes_or_shell(number, line, text)
        return self._is_restart(text)

    def _say(self, number: int, line: Line, said: Said) -> None:
        """Keep what a cluster manager or launcher says."""
        if said.told_pid is not None:
            self._tell(said.told_pid, -int(Signals.SIGTERM), line.time_s)
        elif said.task is not None:
            self._task(number, said.task, said.code, is_first=said.is_first)
        elif said.shell:
            self._kubernetes_or_shell(number, line, said.shell)
        elif said.kind is not None:
            self._note(said.kind, number, said.text or line.text, **said.values)

    # -- torchrun

    def _elastic(self, number: int, text: str, line: Line) -> None:
        time_s = line.time_s
        self.is_torchrun = self.is_torchrun or "torch/distributed/run.py" in text
        if any(name in text for name in _OF_ELASTIC):
            self.is_elastic = True
            if not self.has_failed and (
                "Done waiting for other agents" in text or "group successfully finished" in text
            ):
                self.has_finished, self.is_called_good, self.over_line = "Done" in text, True, number
        if match := _CLOSING.search(text):
            self._begin_unsaid(int(match["pid"]), text)
            self._tell(int(match["pid"]), -signal_number(match["signal"]), time_s)
        elif match := _FORCED.search(text):
            self._tell(int(match["pid"]), -int(Signals.SIGKILL), time_s)
            self.unmoved.add(int(match["pid"]))
        elif match := _TOLD_ITSELF.search(text):
            self._note(EventKind.CANCELLED, number, text)
        elif match := _FAILED.search(text):
            if time_s is not None and self._failed_s is not None and time_s - self._failed_s >= RESTART_S:
                self._begin_unsaid(int(match["pid"]), text)
            self.has_failed, self._agent, self._failed_s = True, _agent(text), time_s
            self.found.append(
                Ending(
                    code=int(match["code"]), line=number, local_rank=int(match["local"]), pid=int(match["pid"]), is_first=True,
                    place=line.place,
                )
            )  # fmt: skip
        elif "Root Cause" in text or "first observed failure" in text:
            self._first = True
        elif match := _BLOCK_TIME.match(text):
            self._time_s = seconds(match, 1970)
        elif match := _BLOCK_RANK.match(text):
            self._rank = int(match["rank"]), int(match["local"])
        elif self._rank is not None and (match := _BLOCK_EXIT.match(text)):
            rank, local = self._rank
            self.found.append(
                Ending(
                    code=int(match["code"]), line=number, rank=rank, local_rank=local, pid=int(match["pid"]), time_s=self._time_s,
                    is_first=self._first, place=line.place,
                )
            )  # fmt: skip
            self._rank, self._first, self.is_over = None, False, True

    def _tell(self, pid: int, code: int, time_s: float | None) -> None:
        """Note a signal of the launcher's, which sends another one if asked again; after long the process had not reacted."""
        told = self.told.get(pid, ())
        if code not in told:
            self.told[pid] = (*told, code)
        first_s = self._told_s.setdefault(pid, time_s)
        if time_s is not None and first_s is not None and time_s - first_s >= PATIENCE_S:
            self.unmoved.add(pid)

    def _begin_unsaid(self, pid: int, text: str) -> None:
        """A launcher that ends new processes after a failure, or reports one more, restarted the job, and says so at INFO."""
        if self.has_failed and self._agent and self._agent == _agent(text) and pid not in self.told:
            self.unsaid_line = max((ending.line for ending in self.found), default=0)
            self.begin_attempt()

    def _is_restart(self, text: str) -> bool:
        is_next = "ill restart worker group" in text or ("attempts left" in text and "restart" in text)
        is_next |= self.has_failed and _RESTARTED.search(text) is not None
        if is_next or (self.is_over and (_LAUNCH.search(text) or (self.has_steps and _RESUMED.match(text)))):
            self.begin_attempt()
            return True
        return False

    def begin_attempt(self) -> None:
        """All that was said is of an earlier attempt."""
        self.attempts += 1
        self.found.clear()
        self.told.clear()
        self.unmoved.clear()
        self._told_s.clear()
        self._late.clear()
        self._is_cancelled, self.has_failed, self._first, self._rank = False, False, False, None
        self.is_over, self.has_steps, self.has_finished, self.code, self.over_line = False, False, False, None, 0

    @property
    def may_restart(self) -> bool:
        """Whether the job has failed: ranks that count their steps again are of another attempt."""
        return self.has_failed or self.is_over

    # -- Slurm

    def _slurm(self, number: int, text: str) -> None:
        if "srun: Terminating" in text or "Job step aborted" in text or "CANCELLED AT" in text:
            self._is_cancelled = True
        if match := TASKS.search(text):
            if len(self.tasks) < MOST_LISTED:
                self.tasks.append((match["host"], match["tasks"]))
            words = match["word"]
            code = -int(match["signal"]) if match["signal"] else int(match["code"]) if match["code"] else WORDS[words]
            is_over = self._is_cancelled or any(ending.is_task and ending.code != -15 for ending in self.found)
            tasks = ranges(match["tasks"])
            if is_over and code == -int(Signals.SIGKILL) and words != "Out Of Memory":
                self._late.extend(self._tasks(number, tasks, code, match["host"]))
                return
            if words == "Out Of Memory":
                for task in tasks:
                    self._note(EventKind.OOM, number, text, cause="oom", task=str(task))
            self.found.extend(self._tasks(number, tasks, code, match["host"]))
        elif match := NODE_LOST.search(text):
            self._note(EventKind.NODE_LOST, number, text, host=match["host"] or match["other"])
        elif match := CANCELLED.search(text):
            kind = next((kind for word, kind in WHY.items() if word in (match["why"] or "")), EventKind.CANCELLED)
            self._note(kind, number, text)  # the host in this line is the step's, which need not be the lost one
        elif "oom_kill event" in text or "oom-kill event" in text:
            self._note(EventKind.OOM, number, text, cause="oom")

    def _tasks(self, number: int, tasks: Sequence[int], code: int, host: str) -> list[Ending]:
        """Tasks of one line of srun's."""
        return [
            Ending(
                code=code, line=number, rank=task, host=one_host(host), is_task=True,
                may_be_launchers=code in (FAILED_WORKER, -int(Signals.SIGKILL)),
                is_first=len(tasks) == 1 and not any(ending.is_task for ending in self.found),
            )
            for task in tasks
        ]  # fmt: skip

    def settle(self, ranks: Collection[int]) -> None:
        """At the end of a file that `ranks` wrote: keep the one task that was killed after others had failed, unless Slurm says
        that it ended the step or no other was left. Then Slurm killed it, which says nothing of it."""
        left = set(ranks) - {ending.rank for ending in (*self.found, *self._late) if ending.is_task}
        if len(self._late) == 1 and left and not self._is_cancelled:
            self.found += self._late
        if len(self._cleaned) == 1 and all(ending.code == -15 for ending in self.found if ending.is_task):
            self.found += self._cleaned

    def _note(self, kind: EventKind, number: int, text: str, **values: str) -> None:
        self.notes.append(
            Note(kind=kind, text=text.strip()[:400], line=number, values={k: v for k, v in values.items() if v})
        )

    # -- MPI, torch.multiprocessing, Lightning

    def _mpi(self, number: int, text: str) -> None:
        if match := MPIRUN.search(text):
            if self._is_cancelled and int(match["signal"]) == Signals.SIGKILL:
                return
            self.found.append(
                Ending(
                    code=-int(match["signal"]), line=number, rank=int(match["rank"]), pid=int(match["pid"]), host=match["host"],
                    is_task=True, is_first=True,
                )
            )  # fmt: skip
        elif match := MPI_NAME.search(text):
            self._spawned = int(match["rank"])
        elif self._spawned is not None and (match := MPI_CODE.search(text)):
            self._task(number, self._spawned, int(match["code"]), is_first=True)
            self._spawned = None
        elif match := HYDRA.search(text):
            self._spawned = int(match["rank"])
        elif self._spawned is not None and (match := HYDRA_SIGNAL.search(text)):
            self._task(number, self._spawned, -int(match["signal"]))
            if int(match["signal"]) == Signals.SIGKILL:  # which Hydra sends to all that are left
                self._cleaned.append(self.found.pop())
            self._spawned = None
        elif match := PALS.search(text):
            code = -int(match["signal"]) if match["signal"] else int(match["code"])
            self._task(number, int(match["rank"]), code, match["host"] or "")

    def _task(self, number: int, task: int, code: int, host: str = "", *, is_first: bool = False) -> None:
        """Keep the end of a process that an mpiexec started."""
        may_be = code == FAILED_WORKER
        self.found.append(
            Ending(
                code=code, line=number, rank=task, host=host, is_task=True, may_be_launchers=may_be, is_first=is_first
            )
        )

    def _spawn(self, number: int, text: str) -> None:
        if match := _SPAWN.search(text):
            code = -signal_number(match["signal"]) if match["signal"] else int(match["code"])
            self.found.append(Ending(code=code, line=number, local_rank=int(match["rank"]), is_first=True))
        elif match := _DEEPSPEED.search(text):
            self.spawned[int(match["pid"])] = int(match["local"])
        elif match := _ENDED_WELL.search(text):
            self.found.append(Ending(code=0, line=number, pid=int(match["pid"])))
        elif match := _LIGHTNING.search(text):
            code, rank = int(match["code"]), int(match["rank"])
            self.found.append(Ending(code=code, line=number, rank=rank, pid=int(match["pid"]), is_first=True))
            self._has_observer = True
        elif match := _COMPOSER.search(text):
            code, rank, pid = int(match["code"]), int(match["rank"]), int(match["pid"]) if match["pid"] else None
            is_first = code > 0 or pid is None
            self.found.append(Ending(code=code, line=number, rank=rank, pid=pid, is_first=is_first))

    # -- Kubernetes, shells

    def _kubernetes_or_shell(self, number: int, line: Line, text: str) -> None:
        if ":  " in text and (ended := self.pod.take(text)) is not None:
            if self.pod.cause:
                self._note(EventKind.KILLED, number, self.pod.text, cause=self.pod.cause, rank=str(ended))
            else:
                self.found.append(Ending(code=self.pod.code, line=number, rank=ended))
        elif ":  " in text and self.pod.has_failed(text):
            self._note(EventKind.EXITED, number, self.pod.named(text), host=self.pod.name)
        elif ("OOMKilled" in text or "Evicted" in text or "Error" in text) and (match := _POD.search(text)):
            if cause := {"OOMKilled": "oom", "Evicted": "evicted"}.get(match["why"], ""):
                self._note(EventKind.KILLED, number, text, host=match["pod"], cause=cause)
        elif "OOMKilled" in text or "evicted" in text or "Evicted" in text:
            host = line.host or self.pod.name
            cause = "evicted" if "victed" in text else "oom"
            self._note(EventKind.KILLED, number, self.pod.named(text), host=host, cause=cause)
        elif "NodeNotReady" in text or "node is not ready" in text:
            self._note(EventKind.NODE_LOST, number, text, host=line.host)
        elif ("preempt" in text.lower() or "nterruption" in text) and _PREEMPTED.search(text):
            self._note(EventKind.PREEMPTED, number, text, host=line.host)
        elif match := (
            _SHELL.match(_BAR.sub("", text)) if text.startswith(_SHELL_STARTS) or ": line " in text else None
        ):
            code = WORDS[match["word"]]
            if self._has_observer and code == -int(Signals.SIGKILL):
                return  # Lightning's process observer kills all that are left, itself last
            values = {"signal": Signals(-code).name, "pid": match["pid"] or "", "host": line.host}
            if rank := _RANK_VARIABLE.search(text):
                self.found.append(Ending(code=code, line=number, rank=int(rank["rank"])))
            else:
                self._note(EventKind.KILLED, number, text, **values)


_LONGEST_END = 100  # of a line that tells a rank's exit code and no more
_LAUNCHERS = (
    "torch/distributed/elastic", "torch/distributed/run.py", "torch/distributed/launch.py", "torch.distributed.run",
    "torch.distributed.launch", "torchrun", "accelerate launch", "accelerate/commands/launch", "deepspeed/launcher",
)  # fmt: skip
MOST_LISTED = 4096  # lines of srun that list tasks
FAILED_WORKER = 1  # torchrun's own exit code after any failure of a worker
RESTART_S = 1.0  # new processes need longer to start
PATIENCE_S = 5.0  # a process that reacts to SIGTERM at all is gone by then, or says why not
_TOLD_ITSELF = re.compile(r"Received (?:\d{1,2}|(?:Signals\.)?SIG[A-Z]{2,5}) death signal, shutting down workers")
_LAUNCH = re.compile(
    r"torch/distributed/run\.py:\d|Starting elastic_operator with launch configs|^\+ \S{0,200}torchrun "
)
# A launcher's or a program's word that a run of the job begins. What Python held back until the end may hold the program's, too,
# but not after steps that were written before.
_RESUMED = re.compile(
    r"(?i)\W{0,8}(?:resum(?:e|ed|ing)|restart(?:ed|ing)?|load(?:ed|ing) (?:from )?(?:the )?checkpoint)\b"
)
_AGENT = re.compile(r"[WE]\d{4} [\d:.]{8,18} (?P<pid>\d{1,9}) ")
_CLOSING = re.compile(r"Sending process (?P<pid>\d{1,9}) closing signal (?P<signal>SIG[A-Z]{2,5})")
_FORCED = re.compile(r"Unable to shutdown process (?P<pid>\d{1,9}) via \S{1,40}, forcefully exi?t?ing via")
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<local>\d{1,6}) \(pid: (?P<pid>\d{1,9})\)"
)
_BLOCK_RANK = re.compile(r"\s*rank\s*: (?P<rank>\d{1,6}) \(local_rank: (?P<local>\d{1,6})\)")
_BLOCK_EXIT = re.compile(r"\s*exitcode\s*: (?P<code>-?\d{1,4}) \(pid: (?P<pid>\d{1,9})\)")
_BLOCK_TIME = re.compile(r"\s*time\s*: (?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[_ ](?P<clock>\d\d:\d\d:\d\d)")
_RESTARTED = re.compile(r"\brestart_count=[1-9]")
_OF_ELASTIC = ("torch/distributed/elastic", "torch.distributed.elastic.agent", "ChildFailedError")
_OF_AGENTS = (*_OF_ELASTIC[:2], "torch/distributed/run.py", "exitcode", "rank", "time", "Root Cause")
_ENDED_WELL = re.compile(r"\[launch\.py:\d{1,6}:main\] Process (?P<pid>\d{1,9}) exits successfully\.")
_DEEPSPEED = re.compile(r"process (?P<pid>\d{1,9}) spawned with command: .{0,900}?--local_rank=(?P<local>\d{1,6})\b")
_SPAWN = re.compile(
    r"[Pp]rocess (?P<rank>\d{1,6}) terminated with (?:signal (?P<signal>SIG[A-Z]{2,5})|exit code (?P<code>\d{1,3})$)"
)
_LIGHTNING = re.compile(
    r"\[rank: (?P<rank>\d{1,6})\] Child process with PID (?P<pid>\d{1,9}) terminated with code (?P<code>-?\d{1,3})"
)
_COMPOSER = re.compile(
    r"\b(?:Global rank|Rank) (?P<rank>\d{1,6})(?: \(PID (?P<pid>\d{1,9})\) exited with| crashed with exit) code "
    r"(?P<code>-?\d{1,3})\b"
)
_POD = re.compile(r"^(?:pod/)?(?P<pod>[a-z0-9][a-z0-9.-]{1,120}) +\d{1,3}/\d{1,3} +(?P<why>OOMKilled|Evicted|Error) ")
_PREEMPTED = re.compile(
    r"(?i)\bpreempt(?:ed|ing|ion)\b.{0,80}(?:instance|node|pod|job|vm|cluster|notice)"
    r"|(?:instance|node|pod|job|vm|cluster)\b.{0,80}\bpreempted|spot (?:instance )?interruption"
)
_SHELL = re.compile(
    rf"(?:(?:\S{{1,200}}: )?line \d{{1,9}}: +(?P<pid>\d{{1,9}}) )?(?P<word>{WORD})(?: \(core dumped\))?"
    r"(?! at [A-Z][a-z]{2} )(?:\s+\S.{0,400})?$"  # but not LSF's `Terminated at Thu Nov 26 03:10:05`
)
_SHELL_STARTS = tuple(WORDS)
_BAR = re.compile(r".{0,200}\b\d{1,9}/\d{1,9} \[[^\]\n]{1,80}\](?=\S)")  # tqdm's, on whose line the shell wrote on
_RANK_VARIABLE = re.compile(r"\b(?:RANK|--(?:node_?)?rank)[= ](?P<rank>\d{1,6})\b")


def _agent(text: str) -> str:
    """The process number of the launcher that wrote a line."""
    match = _AGENT.match(text)
    return match["pid"] if match else ""
