"""Readers of text take time linear in bytes, whatever a line looks like; bounds are of CPU time, generous, per megabyte."""

from __future__ import annotations

import time

import pytest

from titan_ckpt.debug.read.logs import combine
from titan_ckpt.debug.read.reports.gpu_state import read_gpu_state
from titan_ckpt.debug.read.reports.process_stacks import read_process_stacks
from titan_ckpt.debug.read.reports.ras import read_ras_text
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.read.text.job_text import JobText, read_text

pytestmark = pytest.mark.repeats

MEGABYTE = 1 << 20
MOST_CPU_S = 12.0  # a usual log takes 0.2 s
SHAPES = {
    "spaces": " ",
    "brackets": "[",
    "closed brackets": "]",
    "parentheses": "(",
    "nested": "[(",
    "ranks": "[rank0]: ",
    "nested roles": "[default0]:",
    "digits": "1",
    "dates": "2026-11-22 02:07:08,123 ",
    "colons": ":",
    "words": "a ",
    "hosts": "node-3: ",
    "stern": "worker-3 pytorch ",
    "fields": "pid=1, ",
    "json": '{"log":',
    "json strings": '{"log": "\\"',
    "escapes": "\x1b[31m",
    "progress": "12%|###\r",
    "watchdog": "Watchdog caught collective operation timeout: WorkNCCL(",
    "frames": '  File "a", line 1, in f ',
    "errors": "Error: ",
    "xids": "NVRM: Xid (PCI:0000): 79, ",
    "tasks": "srun: error: node[1-9]: tasks 0-3: ",
    "store": "wait timeout after 1ms, keys: /",
    "groups": "[PG ID 0 PG GUID ",
    "CRI": "2026-11-22T02:07:08.123456789Z stderr P ",
    "process": "Process 1: ",
    "threads": "Thread 1 (Thread 0x7f (LWP 1) ",
    "metrics": 'DCGM_FI_DEV_XID_ERRORS{gpu="',
}
# As one long line, as lines of 1,900 characters (the longest that are read whole), and as short ones.
WIDTHS = (MEGABYTE, 1_900, 120)


def lines(piece: str, width: int) -> bytes:
    line = (piece * (width // len(piece) + 1))[:width] + "\n"
    return (line * (MEGABYTE // len(line) + 1)).encode()[:MEGABYTE]


@pytest.mark.parametrize("piece", SHAPES.values(), ids=list(SHAPES))
def test_log_reader_is_linear_on_hostile_lines(piece: str) -> None:
    for width in WIDTHS:
        data = lines(piece, width)[: MEGABYTE // 4]
        begin = time.process_time()
        combine([read_text(JobText(source="job.log", scope="job.log"), [(data, False)])])
        assert time.process_time() - begin < MOST_CPU_S / 4, width


@pytest.mark.parametrize("piece", SHAPES.values(), ids=list(SHAPES))
def test_report_readers_are_linear_on_hostile_lines(piece: str) -> None:
    for width in WIDTHS:
        text = lines(piece, width)[: MEGABYTE // 4].decode()
        begin = time.process_time()
        for head in (
            "",
            "#0-0 (27a0) MISMATCH\n  Rank 1",
            "GPU 00000000:1B:00.0\n    ",
            "Thread 1 (Thread 0x7f (LWP 1)):\n#0 ",
            '  File "a", line 1 in ',
        ):
            read_ras_text(head + text, "x", "")
            read_gpu_state(head + text, "x")
            list(read_process_stacks(head + text, "x"))
            parse_stacks(head + text, "x", "")
        assert time.process_time() - begin < MOST_CPU_S / 4, width
