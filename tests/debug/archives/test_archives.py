"""Incidents in archives: read as if unpacked; what is hostile is refused, and nothing is left behind."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
import zstandard

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.read.archives import unpack
from titan_ckpt.errors import TitanError
from tools.fuzz.memory_store import MemoryStore
from tools.paths import INCIDENTS

DEAD = {f"rank_{rank}.log": (OWN if rank == 1 else PEER).encode() for rank in range(3)}


def tarred(files: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_790_000_000
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


PACKERS = {
    ".tar": tarred,
    ".tar.gz": lambda files: gzip.compress(tarred(files)),
    ".tgz": lambda files: gzip.compress(tarred(files, tarfile.GNU_FORMAT)),
    ".tar.zst": lambda files: zstandard.compress(tarred(files, tarfile.USTAR_FORMAT)),
    ".tar.xz": lambda files: lzma.compress(tarred(files)),
    ".tar.bz2": lambda files: bz2.compress(tarred(files)),
    ".zip": zipped,
}


def said(path: Path) -> list[str]:
    """What the flags say; or the error, where nothing is readable."""
    try:
        return [flag.text for flag in open_run(path).flags]
    except TitanError as error:
        return [str(error)]


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("ending", PACKERS)
def test_an_archive_given_itself_is_read(tmp_path: Path, scratch: Path, ending: str) -> None:
    path = tmp_path / f"bundle{ending}"
    path.write_bytes(PACKERS[ending]({f"./job/{name}": data for name, data in DEAD.items()}))
    run = open_run(path)
    assert diagnose(run)[0].culprits == (1,)
    assert run.url == str(path)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("ending", PACKERS)
def test_an_archive_beside_other_evidence_is_read(tmp_path: Path, ending: str) -> None:
    (tmp_path / "rank_0.log").write_bytes(DEAD["rank_0.log"])
    (tmp_path / f"rest{ending}").write_bytes(
        PACKERS[ending]({name: DEAD[name] for name in ("rank_1.log", "rank_2.log")})
    )
    top = first_verdict(tmp_path)
    assert top.culprits == (1,)
    assert top.evidence[0].source.startswith(f"rest{ending}/rank_1.log")


def test_dumps_in_an_archive_are_judged_like_the_folder(tmp_path: Path) -> None:
    folder = INCIDENTS / "skip"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "skip.tar.gz").write_bytes(gzip.compress(tarred(files)))
    packed, loose = first_verdict(tmp_path), diagnose(open_run(folder))[0]
    assert (packed.verdict, packed.culprits, packed.confidence) == (loose.verdict, loose.culprits, loose.confidence)


def test_archives_of_hosts_are_one_incident(tmp_path: Path) -> None:
    for rank, (name, data) in enumerate(DEAD.items()):
        (tmp_path / f"node{rank}.tar.gz").write_bytes(gzip.compress(tarred({name: data})))
    assert first_verdict(tmp_path).culprits == (1,)


def test_archives_of_several_incidents_are_listed(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day{day}.zip").write_bytes(zipped(DEAD))
    run = open_run(tmp_path)
    assert run.incidents == ("day1.zip", "day2.zip")
    assert diagnose(open_run(tmp_path, incident="day1.zip"))[0].culprits == (1,)


def test_an_archive_beside_folders_of_incidents_is_listed(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day{day}").mkdir()
        (tmp_path / f"day{day}" / "rank_1.log").write_text(OWN)
    (tmp_path / "day3.tar").write_bytes(tarred(DEAD))
    assert "day3.tar" in open_run(tmp_path).incidents


def test_an_archive_beside_its_own_folder_is_not_read_twice(tmp_path: Path) -> None:
    for rank, (name, data) in enumerate(DEAD.items()):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / name).write_bytes(data)
        (tmp_path / f"node{rank}.tar.gz").write_bytes(gzip.compress(tarred({name: data})))
    run = open_run(tmp_path)
    assert not run.incidents
    assert diagnose(run)[0].culprits == (1,)


def test_an_archive_in_an_archive_is_read(tmp_path: Path) -> None:
    hosts = {f"node{n}.tgz": gzip.compress(tarred({name: data})) for n, (name, data) in enumerate(DEAD.items())}
    (tmp_path / "all.zip").write_bytes(zipped(hosts))
    assert first_verdict(tmp_path).culprits == (1,)


def test_an_archive_in_an_object_store_is_read() -> None:
    store = MemoryStore({"dumps.tar.gz": gzip.compress(tarred(DEAD)), "notes.txt": b"step 1\n"})
    assert diagnose(open_run("memory://fuzz", store=store))[0].culprits == (1,)


def test_an_archive_in_an_object_store_given_itself_is_read() -> None:
    fsspec.filesystem("memory").pipe("/kept/dumps.zip", zipped(DEAD))
    assert diagnose(open_run("memory://kept/dumps.zip"))[0].culprits == (1,)


def test_shards_of_data_beside_evidence_are_left_alone(tmp_path: Path) -> None:
    for name, data in DEAD.items():
        (tmp_path / name).write_bytes(data)
    captions = {f"{number:06d}.txt": b"a photo of rank 7\n" for number in range(40)}
    (tmp_path / "shard-00000.tar").write_bytes(tarred(captions))
    run = open_run(tmp_path)
    assert (diagnose(run)[0].culprits, run.world_size) == ((1,), 3)
    assert [flag.source for flag in run.flags if "left alone" in flag.text] == ["shard-00000.tar"]


def test_an_archive_alone_in_a_folder_is_read_whatever_its_names(tmp_path: Path) -> None:
    text = "".join(f"[rank1]: {line}\n" for line in OWN.splitlines()).encode()
    (tmp_path / "bundle.zip").write_bytes(zipped({"everything.txt": text}))
    assert first_verdict(tmp_path).culprits == (1,)


def test_what_macos_packs_beside_files_is_no_evidence(tmp_path: Path) -> None:
    beside = {f"__MACOSX/._{name}": b"\0\5\x16\7" for name in DEAD} | {f"job/._{name}": b"\0\5" for name in DEAD}
    (tmp_path / "mac.zip").write_bytes(zipped({**{f"job/{name}": data for name, data in DEAD.items()}, **beside}))
    run = open_run(tmp_path)
    assert not run.incidents
    assert diagnose(run)[0].culprits == (1,)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.zst"])
def test_of_an_archive_that_is_cut_off_the_rest_is_read(tmp_path: Path, ending: str) -> None:
    packed = PACKERS[ending](DEAD | {"rank_3.log": os.urandom(1 << 19)})
    (tmp_path / f"cut{ending}").write_bytes(packed[: len(packed) - (1 << 18)])
    run = open_run(tmp_path)
    assert diagnose(run)[0].culprits == (1,)
    assert any("cut off" in flag.text for flag in run.flags)


def test_links_and_names_that_lead_outside_are_left_out(tmp_path: Path, scratch: Path) -> None:
    out, links = io.BytesIO(), tmp_path / "links"
    links.mkdir()
    (links / "file").write_text("secret")
    os.link(links / "file", links / "hard")
    os.symlink("/etc", links / "soft")
    os.mkfifo(links / "pipe")
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ("file", "hard", "soft", "pipe"):
            archive.add(links / name, name)
        for name in ("../../up.log", "/etc/absolute.log", "soft/passwd", "rank_1.log"):
            info = tarfile.TarInfo(name)
            info.size = len(OWN)
            archive.addfile(info, io.BytesIO(OWN.encode()))
    (tmp_path / "links.tar").write_bytes(out.getvalue())
    run = open_run(tmp_path / "links.tar")
    assert [flag.text for flag in run.flags if flag.source == "links.tar"] == [
        "left out: 2 links, 2 names that lead out of it"
    ]
    assert not list(scratch.iterdir())
    assert not (scratch.parent / "up.log").exists()


@pytest.mark.parametrize("ending", [".tar.gz", ".tar.zst", ".tar.xz", ".zip"])
def test_a_bomb_is_refused_in_one_line(tmp_path: Path, scratch: Path, ending: str) -> None:
    (tmp_path / f"bomb{ending}").write_bytes(PACKERS[ending]({"rank_0.log": bytes(1 << 26)}))
    texts = said(tmp_path)
    assert len(texts) == 1
    assert "not read: " in texts[0]
    assert "unpack" in texts[0]
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("ending", PACKERS)
def test_very_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(unpack, "MOST_MEMBERS", 50)
    (tmp_path / f"many{ending}").write_bytes(PACKERS[ending]({f"{number}.log": b"x" for number in range(60)}))
    assert any("members" in text for text in said(tmp_path))


def test_headers_that_claim_huge_names_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    (tmp_path / "huge.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 16))
    assert "a name or header of" in said(tmp_path)[0]


def test_a_zip_with_a_huge_directory_is_refused(tmp_path: Path) -> None:
    end = b"PK\5\6" + bytes(4) + (60_000).to_bytes(2, "little") * 2 + (40 << 20).to_bytes(4, "little") + bytes(6)
    with open(tmp_path / "huge.zip", "wb") as file:
        file.truncate(41 << 20)
        file.seek(40 << 20)
        file.write(end)
        file.truncate()
    assert "directory of members" in said(tmp_path)[0]


@pytest.mark.parametrize("ending", PACKERS)
def test_what_is_no_archive_is_flagged(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"other{ending}").write_bytes(b"not an archive at all\n" * 50)
    assert len(said(tmp_path)) == 1


def test_an_encrypted_zip_says_so(tmp_path: Path) -> None:
    data = bytearray(zipped({"rank_0.log": OWN.encode()}))
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + place] |= 1
    (tmp_path / "secret.zip").write_bytes(data)
    assert any("encrypted" in text for text in said(tmp_path))


@pytest.mark.parametrize("damage", ["crc", "stream"])
def test_a_damaged_member_of_a_zip_is_told(tmp_path: Path, damage: str) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank_0.log", "step 1\n" * 500)
        archive.writestr("rank_1.log", "step 1\n" * 500)
    data = bytearray(target.getvalue())
    second = data.rindex(b"PK\x03\x04")
    if damage == "stream":
        data[second + 40 : second + 50] = b"\xff" * 10
    else:
        at = data.rindex(b"PK\x01\x02") + 16
        data[at] ^= 1
    (tmp_path / "evidence.zip").write_bytes(data)
    run = open_run(tmp_path)
    assert 0 in run.ranks
    assert any("rank_1.log" in flag.text for flag in run.flags)


def test_names_of_very_many_folders_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evidence.tar", "w") as archive:
        for name in ("rank_0.log", "f/" * 900 + "rank_1.log"):
            info = tarfile.TarInfo(name)
            info.size = 7
            archive.addfile(info, io.BytesIO(b"step 1\n"))
    assert any("left out: 1 files below more than" in flag.text for flag in open_run(tmp_path).flags)


def test_folders_in_folders_without_end_are_one_incident(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"d" * 400)
    deep.mkdir(parents=True)
    (deep / "rank_0.log").write_text("step 1\n")
    assert 0 in open_run(tmp_path).ranks
