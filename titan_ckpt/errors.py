"""All errors that this package raises, as one tree.

    TitanError                      exit code 3: the operation failed
      UsageError                    exit code 2: the request is invalid
        ConfigError                 a config file, a `--set`, a mesh
        MissingExtraError           a library of an optional extra is not installed
        PlanError                   a plan cannot be made (mesh, placements, mapping)
      StoreError                    an operation of an object store or file system failed
        NotFoundError, AlreadyExistsError, PermissionDeniedError, TransientStoreError, ConditionFailedError
      CheckpointError               a checkpoint is missing, damaged, too new or unsafe
        NotCommittedError, DamagedError, NewerFormatError, UnsafeContentError
      SaveError                     a save failed on some rank
      DataError                     training data that cannot be used
      LoadContractError             checkpoint and model do not match

A message names what failed, where (URL, FQN, rank), expected against found, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar

# Exit codes beside 0 (fine) and 1 (a finding). 70 is EX_SOFTWARE of sysexits.h; 130 and 141 are a shell's for SIGINT and SIGPIPE.
USAGE, FAILED, INTERNAL, INTERRUPTED, OUTPUT_CLOSED = 2, 3, 70, 130, 141


class TitanError(Exception):
    """An error that the user can act on; commands print its message without a traceback."""

    exit_code: ClassVar[int] = FAILED


class UsageError(TitanError):
    """The request is invalid; nothing was attempted."""

    exit_code = USAGE


class ConfigError(UsageError):
    """An invalid config key, value or combination."""


class MissingExtraError(UsageError):
    """A library is missing; the message shows the pip command that installs it."""

    def __init__(self, library: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs {library}, which is not installed: pip install 'titan-ckpt[{extra}]'")


class StoreError(TitanError):
    """A store operation failed."""


class NotFoundError(StoreError):
    """There is nothing at that path."""


class AlreadyExistsError(StoreError):
    """There is already something at that path."""


class PermissionDeniedError(StoreError):
    """Credentials are missing or wrong, or lack permission."""


class TransientStoreError(StoreError):
    """A failure that a retry may cure; callers see it only after the last retry."""


class ConditionFailedError(StoreError):
    """A conditional write failed: another writer was first."""


class CheckpointError(TitanError):
    """A checkpoint is missing, damaged, too new or unsafe."""


class NotCommittedError(CheckpointError):
    """There is no COMMIT: the save never finished, or there is no checkpoint here."""


class DamagedError(CheckpointError):
    """Stored bytes differ from the digests and sizes that were recorded."""


class NewerFormatError(CheckpointError):
    """A later release wrote the checkpoint. If it is the newest one, it is not skipped for an older one either."""


class UnsafeContentError(CheckpointError):
    """A stored file contains a pickled class that is not allowed, or a path outside the run. `what` is without the advice."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class SaveError(TitanError):
    """A save failed on some rank and nothing was committed. That rank's traceback is a note (`__notes__`), not in the message."""


class DataError(TitanError):
    """Training data are empty, binary, malformed, or not those that the run was trained on."""


class LoadContractError(TitanError):
    """Checkpoint and model differ in a way that the load policy does not allow."""


class PlanError(UsageError):
    """No plan can be made from this mesh, placement or mapping."""
