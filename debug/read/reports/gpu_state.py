"""What `nvidia-smi -q`, `dcgmi health` and DCGM's exporter say of broken GPUs, with the processes that run on them.

Formats: the manual page of nvidia-smi (sections ECC Errors, Remapped Rows, Clocks Event Reasons, GPU Recovery Action, Processes);
DCGM's user guide (`dcgmi health -c`) and dcgm-exporter's metrics (`DCGM_FI_DEV_XID_ERRORS{gpu="0",...,Hostname="..."} 79`).
Only counters of this boot (volatile) and states count; what a GPU went through in its whole life does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.schedulers.process_ends import Note

_SMI = b"NVSMI LOG"
_METRIC = re.compile(
    r"(?P<name>DCGM_FI_DEV_(?:XID_ERRORS|ECC_DBE_VOL_TOTAL|ROW_REMAP_FAILURE))\{(?P<labels>[^}]{0,2000})\} (?P<value>\d{1,12})"
)
_LABEL = re.compile(r'(\w{1,60})="([^"]{0,200})"')
_GPU = re.compile(r"GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_PROCESS = re.compile(r"\s*Process ID\s*: (?P<pid>\d{1,9})\s*$")
_HEALTH = re.compile(r"\|\s*(?:-> )?(?:GPU ID: )?(?P<gpu>\d{1,3})\s*\|.{0,40}?(?P<word>Failure)")
_BAD = {
    "DRAM Uncorrectable": "an uncorrectable memory error",
    "SRAM Uncorrectable": "an uncorrectable SRAM error",
    "SRAM Uncorrectable Parity": "an uncorrectable SRAM error",
    "SRAM Uncorrectable SEC-DED": "an uncorrectable SRAM error",
    "Double Bit": "an uncorrectable memory error",
}
_SLOW = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")
_MOST_GPUS = 4096


def is_gpu_state(head: bytes) -> bool:
    """Whether a text begins as one of these tools writes it."""
    return _SMI in head or b"DCGM_FI_DEV_" in head or b"Health Monitor Report" in head


@dataclass(slots=True)
class _Gpu:
    """One GPU's troubles (line, text) and processes, while they are read; `part` is the section that ECC counts are in."""

    bus: str
    part: str = ""
    troubles: list[tuple[int, str, EventKind]] = field(default_factory=list)
    pids: list[str] = field(default_factory=list)


def read_gpu_state(data: str, source: str) -> JobText:
    """Each trouble as a note on the processes of its GPU, or on the job where none is known."""
    text = JobText(source=source, scope=source)
    gpu: _Gpu | None = None
    for number, line in enumerate(data.splitlines(), 1):
        if match := _GPU.match(line):
            _finish(text, gpu)
            gpu = _Gpu(bus=match["bus"])
        elif gpu is not None:
            _take(gpu, number, line)
        elif match := _METRIC.match(line):
            _take_metric(text, number, match)
        elif match := _HEALTH.match(line):
            what = f"DCGM: GPU {match['gpu']}: {' '.join(line.replace('|', ' ').split())}"
            text.endings.notes.append(Note(kind=EventKind.DEVICE_ERROR, text=what[:400], line=number))
    _finish(text, gpu)
    return text


def _take(gpu: _Gpu, number: int, line: str) -> None:
    if match := _PROCESS.match(line):
        gpu.pids.append(match["pid"])
        return
    name, colon, value = (part.strip() for part in line[:400].partition(":"))
    if not colon:
        gpu.part = name or gpu.part
    elif trouble := _trouble(gpu, name, value):
        gpu.troubles.append((number, *trouble))


def _trouble(gpu: _Gpu, name: str, value: str) -> tuple[str, EventKind] | None:
    """What a field says is wrong, if anything."""
    if "is lost" in value or value in ("Unknown Error", "ERR!"):
        return f"{name}: {value}", EventKind.DEVICE_ERROR
    if gpu.part == "Volatile" and name in _BAD and value.isdigit() and int(value):
        return f"{value} times {_BAD[name]} since the driver was loaded", EventKind.DEVICE_ERROR
    if name == "Remapping Failure Occurred" and value == "Yes":
        return "a broken memory row could not be remapped", EventKind.DEVICE_ERROR
    if name in ("GPU Recovery Action", "Recovery Action") and value not in ("None", "N/A", ""):
        return f"the driver asks for: {value}", EventKind.DEVICE_ERROR
    if name in _SLOW and value == "Active":
        return f"its clock is lowered: {name}", EventKind.DEVICE_SLOW
    return None


def _finish(text: JobText, gpu: _Gpu | None) -> None:
    if gpu is None or len(text.endings.notes) >= _MOST_GPUS:
        return
    for number, trouble, kind in gpu.troubles[:16]:
        values = {"bus": gpu.bus, **({"pid": gpu.pids[0]} if len(gpu.pids) == 1 else {})}
        text.endings.notes.append(
            Note(kind=kind, text=f"nvidia-smi: GPU {gpu.bus}: {trouble}"[:400], line=number, values=values)
        )


def _take_metric(text: JobText, number: int, match: re.Match[str]) -> None:
    if not int(match["value"]) or len(text.endings.notes) >= _MOST_GPUS:
        return
    labels = dict(_LABEL.findall(match["labels"]))
    host = labels.get("Hostname", "")
    values = {"bus": labels.get("pci_bus_id", ""), "host_of_gpu": host}
    if match["name"].endswith("XID_ERRORS"):
        values["xid"] = match["value"]
    what = f"DCGM: GPU {labels.get('gpu', '?')} of {host or 'a host'}: {match['name']} is {match['value']}"
    values = {key: value for key, value in values.items() if value}
    text.endings.notes.append(Note(kind=EventKind.DEVICE_ERROR, text=what[:400], line=number, values=values))
