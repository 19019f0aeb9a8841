"""Installing with pip: the wheel, the editable install, the laptop install without torch, missing extras."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import titan_ckpt
from titan_ckpt.cli.main import main
from titan_ckpt.debug.record.ring import compiled
from tools.paths import INCIDENTS, ROOT
from tools.quick_tests import copy_sources, source_files

ROOMS = ("trainer", "debug", "tui", "converters")
LAPTOP = ("argcomplete", "fsspec", "numpy", "rich", "tabulate", "textual", "xxhash", "zstandard")
INCIDENT = INCIDENTS / "skip"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built with the installed setuptools, without a download."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    _copy_sources(source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def _copy_sources(target: Path) -> None:
    """Copy only the project's own files, no tests; a build leaves files in its folder and may pick up stale ones."""
    for path in source_files(ROOT):
        if path.parts[0] not in ("tests", "tools", "benchmarks"):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def _sources() -> Iterator[str]:
    for folder, package in [("titan_ckpt", "titan_ckpt"), *((room, f"titan_ckpt/{room}") for room in ROOMS)]:
        for path in (ROOT / folder).glob("**/*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                yield f"{package}/{path.relative_to(ROOT / folder)}"


def test_the_wheel_holds_every_module_under_one_top_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"titan_ckpt", f"{wheel.name.split('-')[0]}-{wheel.name.split('-')[1]}.dist-info"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == set(_sources())


def test_the_wheel_holds_marker_styles_recipes_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "titan_ckpt/py.typed" in names
    assert {f"titan_ckpt/tui/{path.name}" for path in (ROOT / "tui").glob("*.tcss")} <= set(names)
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml")]
    assert {f"titan_ckpt/{path}" for path in configs} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_compiled_ring_is_optional_in_the_wheel(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rings(built: Path) -> list[str]:
        with zipfile.ZipFile(built) as archive:
            return sorted(Path(name).name.partition(".")[0] for name in archive.namelist() if "ring." in name)

    assert rings(wheel) == (["_ring", "ring"] if compiled is not None else ["ring"])
    _copy_sources(tmp_path / "source")
    monkeypatch.setenv("CC", "/bin/false")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(tmp_path / "source"))
    (built,) = tmp_path.glob("*.whl")
    assert rings(built) == ["ring"]


def test_a_pure_wheel_fits_every_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _copy_sources(tmp_path / "source")
    monkeypatch.setenv("TITAN_CKPT_PURE", "1")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(tmp_path / "source"))
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")


def test_the_source_archive_holds_every_file_and_link(tmp_path: Path) -> None:
    copy_sources(ROOT, tmp_path / "source")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tmp_path / "source"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2]: tar.getmember(name).issym() for name in tar.getnames()}
    wanted = {
        str(path): (ROOT / path).is_symlink() for path in source_files(ROOT) if str(path) != ".git-blame-ignore-revs"
    }
    assert wanted.items() <= held.items()


def test_an_editable_install_follows_the_sources(tmp_path: Path) -> None:
    python = _environment(tmp_path / "venv")
    source = tmp_path / "source"
    _copy_sources(source)
    _link(("setuptools",), python)
    before = set(os.listdir(_site_packages(python)))
    _pip("--python", str(python), "install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(source))
    added = set(os.listdir(_site_packages(python))) - before
    assert {name for name in added if not name.startswith(("__editable__", "titan_ckpt-"))} <= {"__pycache__"}
    where = "import titan_ckpt, titan_ckpt.debug, titan_ckpt.errors as e; print(titan_ckpt.__file__, titan_ckpt.debug.__file__)"
    places = _run(python, "-c", where).stdout.split()
    assert all(Path(place).resolve().is_relative_to(source.resolve()) for place in places)
    _run(python, "-c", "from titan_ckpt.debug.record._ring import Ring", expected=0 if compiled is not None else 1)
    bare = _run(python, "-c", "import trainer", expected=1)
    assert "No module named 'trainer'" in bare.stderr


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def _site_packages(python: Path) -> Path:
    return Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())


def _run(program: Path, *arguments: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def laptop(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and its own dependencies alone.

    The dependencies are copied from the environment that runs the tests; nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("laptop") / "venv"
    python = _environment(folder)
    _link(LAPTOP, python)
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    return folder / "bin"


def _link(distributions: tuple[str, ...], python: Path) -> None:
    site = _site_packages(python)
    for path in _installed_files(distributions):
        if not (site / path.name).exists():
            (site / path.name).symlink_to(path)


def _installed_files(names: tuple[str, ...]) -> Iterator[Path]:
    """Top-level files and folders of these distributions and all their requirements."""
    code = (
        "import importlib.metadata as m, re, sys, json\n"
        "todo, done, out = sys.argv[1:], set(), set()\n"
        "while todo:\n"
        "    name = re.sub(r'[-_.]+', '-', todo.pop()).lower()\n"
        "    if name in done: continue\n"
        "    done.add(name)\n"
        "    d = m.distribution(name)\n"
        "    out |= {str(d.locate_file(f.parts[0])) for f in d.files or () if f.parts[0] != '..'}\n"
        "    for r in d.requires or ():\n"
        "        if 'extra' not in r.partition(';')[2] and 'platform' not in r.partition(';')[2]:\n"
        "            n = re.match(r'[A-Za-z0-9._-]+', r).group()\n"
        "            try: m.distribution(n)\n"
        "            except m.PackageNotFoundError: continue\n"
        "            todo.append(n)\n"
        "print(json.dumps(sorted(out)))\n"
    )
    yield from map(Path, json.loads(_run(Path(sys.executable), "-c", code, *names).stdout))


def test_the_laptop_install_needs_only_its_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {text.split(">")[0] for text in project["dependencies"]} == set(LAPTOP)


def test_the_laptop_install_has_no_torch(laptop: Path) -> None:
    assert "No module named 'torch'" in _run(laptop / "python", "-c", "import torch", expected=1).stderr


def test_ls_inspect_and_verify_run_without_torch(laptop: Path, tmp_path: Path) -> None:
    _save_checkpoint(tmp_path / "run")
    assert "committed" in _run(laptop / "titan-ckpt", "ls", str(tmp_path / "run")).stdout
    assert "model.weight" in _run(laptop / "titan-ckpt", "inspect", str(tmp_path / "run"), "*").stdout
    assert "whole" in _run(laptop / "titan-ckpt", "verify", "--data", str(tmp_path / "run")).stdout


def _save_checkpoint(url: Path) -> None:
    code = "import torch, titan_ckpt, sys; titan_ckpt.save(sys.argv[1], {'model': {'weight': torch.ones(3)}}, step=7)"
    _run(Path(sys.executable), "-W", "error", "-c", code, str(url))


def test_debug_names_the_rank_without_torch(laptop: Path) -> None:
    found = json.loads(_run(laptop / "titan-ckpt", "debug", str(INCIDENT), "--json", expected=1).stdout)
    assert found["verdicts"][0]["verdict"] == "SKIPPED_COLLECTIVE"


def test_tui_draws_an_incident_without_torch(laptop: Path, tmp_path: Path) -> None:
    _run(laptop / "titan-ckpt", "tui", str(INCIDENT), "--screenshot", str(tmp_path / "screen.svg"))
    assert (tmp_path / "screen.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "pip"),
    [
        (["train", "x.toml"], "titan-ckpt[train]"),
        (["init"], "titan-ckpt[train]"),
        (["reshard", "{run}", "{out}", "--mesh", "dp_shard=2", "--dtype", "bfloat16"], "titan-ckpt[torch]"),
        (["ls", "s3://bucket/run"], "titan-ckpt[s3]"),
        (["debug", "inject", "skip"], "titan-ckpt[torch]"),
    ],
)
def test_a_missing_extra_prints_its_pip_command(laptop: Path, tmp_path: Path, arguments: list[str], pip: str) -> None:
    words = [word.format(run=tmp_path / "run", out=tmp_path / "out") for word in arguments]
    if "{run}" in " ".join(arguments):
        _save_checkpoint(tmp_path / "run")
    stderr = _run(laptop / "titan-ckpt", *words, expected=2).stderr
    assert f"pip install '{pip}'" in stderr
    assert "Traceback" not in stderr


def test_the_command_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"titan-ckpt {titan_ckpt.__version__}\n"
