"""What torch.compile made, kept with each checkpoint, so that a run resumed on another machine compiles nothing again.

The compiler's own cache (`TORCHINDUCTOR_CACHE_DIR`) in a folder of the run, as a compressed tar. Its files are machine code that
a resumed run executes: only for stores in which nobody else can write. `torch.compiler.save_cache_artifacts` is not enough: on a
CPU it lacks the C++ kernels, which take most of the time.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import xxhash
import zstandard

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import DataError

log = logging.getLogger(__name__)
ASSET = "compile_cache.tar.zst"  # of a checkpoint
LIMIT_BYTES = 1 << 30  # unpacked; a larger cache is not kept
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_TEMPORARY = (".lock", ".tmp")


class CompileCache:
    """The compiler's cache of one run on one machine, which all of its ranks there share."""

    def __init__(self, url: str) -> None:
        """Let the compiler use the folder of the run at `url`; DataError if the folder is there and not ours alone."""
        name = xxhash.xxh3_64_hexdigest(url.encode())
        self.folder = Path(tempfile.gettempdir()) / f"titan-ckpt-compiled-{os.getuid()}-{name}"
        self._packed: tuple[list[tuple[str, int]], bytes] = ([], b"")
        _make_private(self.folder)
        if (asked := os.environ.get(_CACHE, str(self.folder))) != str(self.folder):
            log.warning(
                "save.compile_cache keeps what is compiled in %s; %s=%s is not used", self.folder, _CACHE, asked
            )
        os.environ[_CACHE] = str(self.folder)

    def fill(self, checkpoint: Checkpoint) -> None:
        """Add the files that a checkpoint has."""
        if ASSET in checkpoint.manifest.assets:
            count = self.unpack(checkpoint.asset(ASSET), str(checkpoint))
            log.info("compiled code: %d files of %s added to %s", count, checkpoint, self.folder)

    def unpack(self, content: bytes, where: str) -> int:
        """Write the files of an asset that the folder lacks; returns how many. DataError for what is no such asset."""
        count = 0
        try:
            with (
                zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as plain,
                tarfile.open(fileobj=plain, mode="r|") as archive,
            ):
                total = 0
                for member in archive:
                    total += member.size
                    if not member.isreg() or not _is_inside(member.name) or total > LIMIT_BYTES:
                        raise DataError(
                            f"{where}: {member.name!r} cannot be a part of {ASSET}; nothing more is unpacked"
                        )
                    data = archive.extractfile(member)
                    assert data is not None
                    count += _write_missing(
                        self.folder / member.name, data.read(), executable=bool(member.mode & 0o100)
                    )
        except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
            raise DataError(f"{where}: {ASSET} cannot be unpacked: {error}") from error
        return count

    def asset(self) -> dict[str, bytes]:
        """The cache as an asset, packed anew if files were added; nothing, with a warning, if it is too large."""
        files = self._files()
        if files != self._packed[0]:
            total = sum(size for _, size in files)
            if total > LIMIT_BYTES:
                log.warning("the compiler's cache has %.1f GB; save.compile_cache keeps 1 GB at most", total / 1e9)
            self._packed = (files, b"" if total > LIMIT_BYTES else self._pack(files))
        return {ASSET: self._packed[1]} if self._packed[1] else {}

    def _files(self) -> list[tuple[str, int]]:
        found = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # other ranks still compile
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and not name.endswith(_TEMPORARY):
                        found.append((str(path.relative_to(self.folder)), status.st_size))
        return sorted(found)

    def _pack(self, files: list[tuple[str, int]]) -> bytes:
        packed = io.BytesIO()
        with (
            zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as out,
            tarfile.open(fileobj=out, mode="w|") as archive,
        ):
            for name, _ in files:
                with suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
                    member = tarfile.TarInfo(name)
                    status = os.fstat(file.fileno())
                    member.size, member.mode = status.st_size, stat.S_IMODE(status.st_mode) & 0o700
                    archive.addfile(member, file)
        return packed.getvalue()


def _make_private(folder: Path) -> None:
    """Make the folder; DataError if it is a link, another user's, or open to others, who could put code into it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DataError(f"{folder} is not a folder that only this user can write: code in it would run; remove it")


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in Path(name).parts


def _write_missing(path: Path, data: bytes, *, executable: bool) -> int:
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(part).chmod(0o700 if executable else 0o600)
    Path(part).replace(path)
    return 1
