"""A store without a server: every file lies on the peer that wrote it and on others, and is read from whoever has it.

Large files have `copies` copies, on the writer and the next peers of the crew; small ones (COMMIT, manifest) are everywhere. A
file is gone when all peers that hold it are. Two crews that cannot see each other may write the same step; both are right.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from examples.phones.desk import ask
from titan_ckpt import Store, open_store
from titan_ckpt.errors import ConditionFailedError, NotFoundError, StoreError
from titan_ckpt.store.base import Buffer, ObjectInfo

log = logging.getLogger(__name__)
SMALL_BYTES = 256 << 10


class PeersStore(Store):
    """The files under `prefix` of all peers; `own` is the one at `address`, `others` are addresses, the next rank's first.

    `on_fault` is told of a file that `own` cannot keep, before the error goes its way.
    """

    def __init__(
        self, own: Store, address: str, others: Sequence[str], prefix: str, *, copies: int = 2,
        on_fault: Callable[[StoreError], None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(f"{own.url}/{prefix}")
        self._own = open_store(self.url)
        self._prefix, self._copies = prefix, copies
        self._address, self._others = address, list(others)
        self._on_fault = on_fault

    def spread(self) -> None:
        """Copy this peer's files to those who lack them, as when they were written; for a crew with new members."""
        files = list(self._own.list())
        if not files:
            return
        answers = self._ask_others("GET", "list", "")
        have = {address: self._paths(answer or b"[]") for address, answer in answers}
        for info in files:
            holders = {address for address in self._others if info.path in have[address]}
            wanted = self._num_copies(info.size_bytes) - len(holders)
            if wanted > 0 and min([self._address, *holders]) == self._address:
                self._send(info.path, [address for address in self._others if address not in holders], wanted)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        view[:] = self._from_any(path, start, len(view))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self._from_any(path, start, length)

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        try:
            info = self._own.write(path, parts)
        except StoreError as error:
            self._on_fault(error)
            raise
        self._send(path, self._others, self._num_copies(info.size_bytes))
        return self.stat(path)

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        found = self.stat(path).version if self.exists(path) else None
        if found != version:
            raise ConditionFailedError(f"{self.where(path)}: was changed by another writer")
        return self.write(path, [data])

    def folders(self, prefix: str = "") -> list[str]:
        depth = prefix.count("/") + 1 if prefix else 0
        parts = (info.path.split("/") for info in self.list(prefix))
        return sorted({names[depth] for names in parts if len(names) > depth + 1})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = {info.path: info for info in self._own.list(prefix)}
        for _, answer in self._ask_others("GET", "list", prefix):
            for path, size_bytes, modified_s in json.loads(answer or b"[]"):
                inside = path.removeprefix(f"{self._prefix}/")
                found.setdefault(inside, _info(inside, size_bytes, modified_s))
        return iter([found[path] for path in sorted(found)])

    def stat(self, path: str) -> ObjectInfo:
        folder = path.rpartition("/")[0]
        info = next((each for each in self.list(folder) if each.path == path), None)
        if info is None:
            raise NotFoundError(f"{self.where(path)}: no reachable peer has it")
        version = f"{info.size_bytes}"
        if info.size_bytes <= SMALL_BYTES:
            version = hashlib.sha256(self.read(path)).hexdigest()
        return _info(path, info.size_bytes, info.modified_s, version)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._own.delete([path])
            for _ in self._ask_others("DELETE", "files", path):
                pass

    def honours_conditions(self) -> bool:
        """Among the ranks of one crew: only its rank 0 writes conditionally."""
        return True

    def _from_any(self, path: str, start: int, length: int | None) -> bytes:
        """The bytes from this peer, else from the first that has them."""
        try:
            return self._own.read(path, start, length)
        except NotFoundError:
            size = "" if length is None else f"&length={length}"
            answers = self._ask_others("GET", "files", path, f"?start={start}{size}")
            data = next((answer for _, answer in answers if answer is not None), None)
        if data is None:
            raise NotFoundError(f"{self.where(path)}: no reachable peer has it")
        return data

    def _num_copies(self, size_bytes: int) -> int:
        """How many others should have a file."""
        return len(self._others) if size_bytes <= SMALL_BYTES else min(self._copies - 1, len(self._others))

    def _send(self, path: str, addresses: Sequence[str], wanted: int) -> None:
        """Send a file of this peer to the first `wanted` of `addresses` that can be reached."""
        if wanted <= 0:
            return
        answers = self._ask_others("PUT", "files", path, body=self._own.read(path), addresses=addresses)
        kept = (address for address, answer in answers if answer is not None)
        if sum(1 for _ in itertools.islice(kept, wanted)) < wanted:
            log.warning("%s has fewer copies than it should: peers are gone, or cannot keep it", self.where(path))

    def _paths(self, answer: bytes) -> set[str]:
        return {path.removeprefix(f"{self._prefix}/") for path, _, _ in json.loads(answer)}

    def _ask_others(
        self,
        method: str,
        kind: str,
        path: str,
        query: str = "",
        body: bytes | None = None,
        addresses: Sequence[str] | None = None,
    ) -> Iterator[tuple[str, bytes | None]]:
        """The answers of those that can be reached; a peer that cannot is not asked again by this crew."""
        target = f"/{kind}/{self._prefix}/{path}".rstrip("/") + query
        for address in list(self._others if addresses is None else addresses):
            try:
                yield address, ask(address, method, target, body)
            except OSError as error:
                log.warning("%s is gone: %s", address, error)
                if address in self._others:
                    self._others.remove(address)


def _info(path: str, size_bytes: int, modified_s: float, version: str = "") -> ObjectInfo:
    return ObjectInfo(path=path, size_bytes=size_bytes, modified_s=modified_s, version=version)
