"""Archives, caches and web servers are read; what would write through them is refused."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import titan_ckpt as tc
from titan_ckpt.errors import TitanError, TransientStoreError, UsageError
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store

STATE = {"w": torch.arange(4.0)}


class QuietHandler(SimpleHTTPRequestHandler):
    """A plain web server, without its log."""

    def log_message(self, *_: object) -> None:
        pass


def test_a_run_is_read_from_a_zip_a_cache_and_a_web_server(tmp_path: Path) -> None:
    tc.save(tmp_path / "run", STATE, step=1)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "run")
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = f"http://127.0.0.1:{server.server_port}/run"
        for url in (f"zip://::{archive}", f"simplecache::file://{tmp_path}/run", web):
            assert tc.verify(url, read_data=True) == []
            target = {"w": torch.zeros(4)}
            if url == web:
                with pytest.raises(TransientStoreError, match="the whole object; a server that answers no ranges"):
                    tc.load(url, target)
                continue
            tc.load(url, target)
            assert target["w"].tolist() == [0, 1, 2, 3]
        server.shutdown()


def test_an_archive_or_cache_that_the_caller_opened_is_read(tmp_path: Path) -> None:
    """The path of a cache over a local disk is absolute, that of an archive is not."""
    run = tmp_path / "run"
    tc.save(run, STATE, step=1)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "run")
    opened: list[tuple[str, Any]] = [("run", fsspec.filesystem("zip", fo=archive))]
    for name in ("simplecache", "filecache"):
        cache = fsspec.filesystem(name, target_protocol="file", cache_storage=str(tmp_path / name))
        opened += [(str(run), cache), (f"file://{run}", cache)]
    for path, filesystem in opened:
        store = open_store(path, filesystem=filesystem)
        assert [info.step for info in tc.list_checkpoints(store)] == [1], store
        assert tc.load(store, {"w": torch.zeros(4)}).loaded == ["w"]
        with pytest.raises(TitanError, match="is read, not written"):
            tc.save(store, STATE, step=2)


def test_both_names_of_the_local_disk_are_one_store(tmp_path: Path) -> None:
    tc.save(f"local://{tmp_path}/run", STATE, step=1)
    tc.save(f"local://{tmp_path}/run", STATE, step=2)
    assert isinstance(open_store(f"LOCAL://{tmp_path}/run"), FileStore)
    tc.prune(f"local://{tmp_path}/run", tc.RetentionPolicy(keep_last=1), dry_run=False)
    assert [info.step for info in tc.list_checkpoints(tmp_path / "run")] == [2]
    with pytest.raises(UsageError, match="one folder"):
        tc.Saver(tmp_path / "run", tc.SaveOptions(mirror=f"local://{tmp_path}/run"))
    with pytest.raises(UsageError, match=r"after local:// must be an absolute path"):
        tc.save("local://run", STATE, step=1)


def test_what_is_read_through_a_copy_is_not_written(tmp_path: Path) -> None:
    tc.save(tmp_path / "run", STATE, step=1)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "run")
    for url in (f"zip://::{archive}", f"simplecache::file://{tmp_path}/run", "http://127.0.0.1:9/run"):
        store = open_store(url)
        for change in (partial(store.write, "a", [b"x"]), partial(store.delete, ["step-00000001/COMMIT.json"])):
            with pytest.raises(UsageError, match="is read, not written"):
                change()
    with pytest.raises(TitanError, match="simplecache is read, not written"):
        tc.save(f"simplecache::file://{tmp_path}/run", STATE, step=2)
    assert [info.step for info in tc.list_checkpoints(tmp_path / "run")] == [1]
