"""What MPI's launchers say of a process that ended: Open MPI's mpirun, MPICH's and Intel's Hydra, HPE's PALS."""

from __future__ import annotations

import re

MPIRUN = re.compile(
    r"noticed that process rank (?P<rank>\d{1,6}) with PID (?P<pid>\d{1,9}) on node (?P<host>\S{1,80}) "
    r"exited on ?signal (?P<signal>\d{1,2})"
)
MPI_ABORT = re.compile(
    r"MPI_ABORT was invoked on rank (?P<rank>\d{1,6}) in communicator MPI_COMM_WORLD"
    r"|application called MPI_Abort\(MPI_COMM_WORLD, (?P<code>\d{1,3})\) - process (?P<other>\d{1,6})"
)
MPI_NAME = re.compile(r"Process name: \[{1,2}[^\s]{1,80},(?P<rank>\d{1,6})\]")
MPI_CODE = re.compile(r"Exit code: +(?P<code>\d{1,3})")
HYDRA = re.compile(r"RANK (?P<rank>\d{1,6}) PID \d{1,9} RUNNING AT")
HYDRA_SIGNAL = re.compile(r"KILLED BY SIGNAL: (?P<signal>\d{1,2})")
PALS = re.compile(
    r"^(?:(?P<host>[\w.-]{1,120}): )?rank (?P<rank>\d{1,6}) "
    r"(?:died from signal (?P<signal>\d{1,2})|exited with code (?P<code>\d{1,3}))\b"
)
