"""PyTorch's tests, from Debian's source package of pytorch; nothing of them is kept in the project."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from titan_ckpt.errors import NotFoundError

TESTS = "test/distributed/checkpoint"
RELEASES = ("sid", "trixie")
"""Releases of Debian, the newest first; a mirror may list a package that it no longer has."""

_SOURCES = "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {release} main\n"
_CONFIGURATION = """\
Dir::State "{folder}/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
"""


def download(folder: Path) -> Path:
    """The folder of the tests, downloaded by apt into `folder` from the system's own mirror, whose lists stay as they are.

    NotFoundError if no release has the package.
    """
    mirror, problems = _mirror(), []
    for release in RELEASES:
        target = folder / release
        (target / "state/lists/partial").mkdir(parents=True, exist_ok=True)
        (target / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
        (target / "sources.list").write_text(_SOURCES.format(mirror=mirror, release=release))
        (target / "apt.conf").write_text(_CONFIGURATION.format(folder=target))
        try:
            _apt(target, "update", "-qq")
            _apt(target, "source", "--download-only", "-qq", "pytorch")
            return _unpack(next(target.glob("pytorch_*.orig.tar.*")), target)
        except (subprocess.CalledProcessError, StopIteration, OSError) as error:
            said = getattr(error, "stderr", "") or str(error)
            problems.append(f"{release}: {said.strip().splitlines()[-1] if said.strip() else 'no source archive'}")
    raise NotFoundError(f"pytorch's source package: {'; '.join(problems)}; give the tests yourself with --tests FOLDER")


def _mirror() -> str:
    """The address from which this Debian installs its packages."""
    ask = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotFoundError(
            f"pytorch's source package: no apt here ({error}); give the tests with --tests FOLDER"
        ) from error
    for line in found:
        label, _, address = line.partition(" ")
        if label == "Debian":
            return address
    raise NotFoundError(
        "pytorch's source package: apt has no lists of Debian; run `apt-get update`, or give --tests FOLDER"
    )


def _apt(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["apt-get", *arguments], cwd=folder, env={"PATH": "/usr/bin:/bin", "APT_CONFIG": str(folder / "apt.conf")},
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip


def _unpack(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as package:
        wanted = [member for member in package if f"/{TESTS}/" in member.name and member.isfile()]
        package.extractall(target, members=wanted, filter="data")
    return next(target.glob(f"*/{TESTS}"))
