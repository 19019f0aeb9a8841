"""Shared fixtures: a real S3 server, started once on first use, run URLs that no other test uses, and a guard of the process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.process_state import ProcessState, threads_left, waiting_threads
from titan_ckpt.demo.s3_server import Server, running_server

# The same cases in every run: campaigns search for new ones (`make hostile`, `make fuzz`).
hypothesis.settings.register_profile("any machine", deadline=None, derandomize=True)
hypothesis.settings.load_profile("any machine")
BUCKET = "titan-tests"
_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--nothing-left`: to find the tests on which later ones may depend."""
    parser.addoption("--nothing-left", action="store_true", help="fail each test that leaves the process changed")


COUNTED = 10  # cases of a parametrised test whose lines coverage counts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that repeat lines of others, and the further cases of a test, out of the coverage: tracing takes as long
    again. `make mutants`, which asks by context which test runs which line, traces them all."""
    if config.getoption("cov_context", None):
        return
    cases = Counter[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        cases[name] += 1
        if cases[name] > COUNTED or item.get_closest_marker("repeats"):
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Puts back what a test changed in the process: the tests that follow would inherit it."""
    before, threads = ProcessState.now(), waiting_threads()
    yield
    changed = before.put_back()
    if request.config.getoption("--nothing-left"):
        changed += [f"thread {name}" for name in threads_left(threads)]
        assert not changed, f"left behind: {'; '.join(changed)}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS on loopback for the whole session, with an empty bucket."""
    with running_server(tmp_path_factory.mktemp("s3"), [BUCKET]) as server:
        yield server


@pytest.fixture
def s3_environment(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment variables that point `s3://` at the test server; set in this process, returned for child processes."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    return s3_server.environment


@pytest.fixture
def s3_url(s3_environment: dict[str, str]) -> str:
    """A unique run URL on the test server."""
    assert s3_environment
    return f"s3://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A unique run URL, on each kind of store."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return str(tmp_path / "run") if request.param == "file" else f"memory://run-{next(_numbers)}"
