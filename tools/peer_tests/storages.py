"""torch's storage of checkpoints in files, and what can take its place."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import titan_ckpt
from titan_ckpt.format.names import step_folder

STEP = 1
USES = multiprocessing.get_context("fork").Value("i", 0)
"""How often our writer has committed and our reader has read, in this process and those forked from it."""


class OurWriter(titan_ckpt.StorageWriter):
    """`StorageWriter` called like torch's: with a folder, in which it writes one step."""

    def __init__(self, path: Any, *_: Any, overwrite: bool = True, **__: Any) -> None:
        super().__init__(path, step=STEP, overwrite=overwrite)

    @property
    def checkpoint_id(self) -> str:
        """The folder, as it was given."""
        return super().checkpoint_id.removesuffix(f"@{STEP}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether we can write a step there."""
        return titan_ckpt.StorageWriter.validate_checkpoint_id(f"{checkpoint_id}@{STEP}")

    def finish(self, metadata: Any, results: Any) -> None:
        """Commit, and count it."""
        super().finish(metadata, results)
        _count()


class OurReader(titan_ckpt.StorageReader):
    """`StorageReader` called like torch's: with a folder, of which it reads the newest step."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path)

    @property
    def checkpoint_id(self) -> str:
        """The folder, as it was given."""
        return super().checkpoint_id.removesuffix(f"@{STEP}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Open, and count it."""
        metadata = super().read_metadata(*args, **kwargs)
        _count()
        return metadata


def _count() -> None:
    with USES.get_lock():
        USES.value += 1


class TorchOfOurs(FileSystemReader):
    """torch's reader of what `OurWriter` wrote."""

    @property
    def path(self) -> Path:
        """The folder of the step, whichever class of torch's set the run's."""
        return _inside(self._given)

    @path.setter
    def path(self, given: str | os.PathLike[str]) -> None:
        self._given = given


def _inside(path: str | os.PathLike[str]) -> Path:
    step = Path(path, step_folder(STEP))
    return step if step.is_dir() else Path(path)


STORAGES: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "torch": (FileSystemWriter, FileSystemReader),
    "ours": (OurWriter, OurReader),
    "mixed": (OurWriter, TorchOfOurs),
}
"""Writer and reader by name; in "mixed", torch reads what we wrote."""


def put_in_place(name: str) -> None:
    """From now on torch's names of its writer and reader mean those of `name`, in all modules of torch."""
    replaced = {id(FileSystemWriter): STORAGES[name][0], id(FileSystemReader): STORAGES[name][1]}
    for module in [each for key, each in sys.modules.items() if key.startswith("torch.distributed.checkpoint")]:
        for attribute, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, attribute, replaced[id(value)])
