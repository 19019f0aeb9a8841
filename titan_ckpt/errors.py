"""Every error this package raises on purpose, as one tree.

    TitanError                      exit code 3: the operation failed
      UsageError                    exit code 2: what was asked for makes no sense
        ConfigError                 a config file, a `--set`, a mesh
        MissingExtraError           a library that an extra brings is not installed
      StoreError                    an object store or file system said no
        NotFoundError, AlreadyExistsError, PermissionDeniedError, TransientStoreError, ConditionFailedError
      CheckpointError               a checkpoint is not what it should be
        NotCommittedError, DamagedError, NewerFormatError, UnsafeContentError
      DataError                     training data that cannot be used
      LoadContractError             checkpoint and model do not fit
      PlanError                     a plan cannot be made (mesh, placements, mapping)

A message says what failed, where (URL, FQN, rank), expected against found, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class TitanError(Exception):
    """An error the user can act on; the command line prints its text without a traceback."""

    exit_code: ClassVar[int] = 3


class UsageError(TitanError):
    """The request itself is wrong; nothing was tried."""

    exit_code = 2


class ConfigError(UsageError):
    """A config value, key or combination that cannot be used."""


class MissingExtraError(UsageError):
    """A library is missing; the message is the pip command that brings it."""

    def __init__(self, library: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs {library}, which is not installed: pip install 'titan-ckpt[{extra}]'")


class StoreError(TitanError):
    """A store operation failed for good."""


class NotFoundError(StoreError):
    """Nothing at that path."""


class AlreadyExistsError(StoreError):
    """Something is at that path already."""


class PermissionDeniedError(StoreError):
    """No credentials, wrong ones, or no right to do this."""


class TransientStoreError(StoreError):
    """A failure that another try may cure; raised to callers only after the retries are spent."""


class ConditionFailedError(StoreError):
    """A conditional write lost: somebody else wrote first."""


class CheckpointError(TitanError):
    """A checkpoint is not what it should be."""


class NotCommittedError(CheckpointError):
    """No COMMIT: the save never finished, or there is no checkpoint here."""


class DamagedError(CheckpointError):
    """Stored bytes differ from what the manifest promises."""


class NewerFormatError(CheckpointError):
    """A later release wrote it; this one can neither read it nor, where it is the newest, pass it over."""


class UnsafeContentError(CheckpointError):
    """A stored file asks for something that only code may do (a pickled class, a path outside the run)."""


class DataError(TitanError):
    """Training data that are empty, binary, malformed, or not the ones a run was trained on."""


class LoadContractError(TitanError):
    """What the checkpoint holds and what the model wants differ in a way the policy does not allow."""


class PlanError(UsageError):
    """A mesh, placement or mapping from which no plan can be made."""
