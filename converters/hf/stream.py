"""Run target files through the executor; digest tensors in place by writing them nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NoReturn

from titan_ckpt.errors import StoreError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.location import scheme
from titan_ckpt.rewrite.execute import Execution, FileResult
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.rewrite.plan import FileGroup, Region, RewriteSource, TargetFile
from titan_ckpt.sharding.placement import Box
from titan_ckpt.store.base import Buffer, ObjectInfo, Store

MEMORY_BYTES = 160 << 20
# Between two disks larger buffers gain nothing: the first touch of their memory costs as much as a hash.
LOCAL_BUFFER_BYTES = 4 << 20
OnBytes = Callable[[int], None]


def stream(
    source: RewriteSource,
    source_store: Store,
    target_store: Store,
    files: Sequence[TargetFile],
    *,
    memory_bytes: int = MEMORY_BYTES,
    is_file_digested: bool = False,
    on_progress: OnBytes | None = None,
) -> list[FileResult]:
    """Write `files` one after another.

    Source digests are verified on the way. Every region with a key is digested; whole files only if asked, since a hash costs
    a tenth of the copy.
    """
    execution = Execution(
        source=source,
        source_store=source_store,
        target_store=target_store,
        budget=_budget(source, source_store, files, target_store, memory_bytes),
        is_file_digested=is_file_digested,
        on_progress=on_progress,
    )
    groups = (FileGroup(files=(file,)) for file in files)
    return [result for results in execution.run(groups) for result in results]


def _budget(
    source: RewriteSource, source_store: Store, files: Sequence[TargetFile], target: Store, memory_bytes: int
) -> Budget:
    """The default budget, with larger buffers if a transform needs more rows at once than one holds."""
    budget = Budget.of(memory_bytes, source_store, target)
    if _is_on_disk(source_store) and (_is_on_disk(target) or isinstance(target, _Nowhere)):
        budget = replace(budget, buffer_bytes=min(budget.buffer_bytes, LOCAL_BUFFER_BYTES))
    needed = [_group_bytes(source, s) for f in files for s in f.segments if isinstance(s, Region) and s.transform]
    return replace(budget, buffer_bytes=max([budget.buffer_bytes, *(4 * size for size in needed)]))


def _is_on_disk(store: Store) -> bool:
    return scheme(store.url) == "file"


def _group_bytes(source: RewriteSource, region: Region) -> int:
    """Bytes of the rows that `region`'s transform needs at once."""
    assert region.transform is not None
    tensor = source.tensors[region.tensor]
    element_size = max(tensor.element_size, ELEMENT_SIZE[region.transform.dtype])
    return region.transform.row_multiple * prod(tensor.global_shape[1:]) * element_size


def tensor_digests(source: RewriteSource, store: Store, names: Iterable[str]) -> dict[str, bytes]:
    """xxh3-128 of each tensor's row-major bytes, in however many chunks it is stored."""
    files = [
        TargetFile(
            path=name, segments=(Region(tensor=name, box=Box.whole(source.tensors[name].global_shape), key=name),)
        )
        for name in names
    ]
    return {result.path: result.digests[result.path] for result in stream(source, store, _Nowhere(), files)}


class _Nowhere(Store):
    """A target that discards every byte, so that the executor only digests."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        return ObjectInfo(path=path, size_bytes=sum(len(part) for part in parts), modified_s=0.0, version="")

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:  # noqa: ARG002
        self._refuse(path)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:  # noqa: ARG002
        self._refuse(path)

    def folders(self, prefix: str = "") -> list[str]:  # noqa: ARG002
        return []

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:  # noqa: ARG002
        return iter(())

    def stat(self, path: str) -> ObjectInfo:
        self._refuse(path)

    def delete(self, paths: Iterable[str]) -> None:  # noqa: ARG002
        return None

    def honours_conditions(self) -> bool:
        return False

    def _refuse(self, path: str) -> NoReturn:
        raise StoreError(f"{path}: was digested, not stored")
