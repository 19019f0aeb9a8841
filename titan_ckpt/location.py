"""URLs of runs and checkpoints: parse `URL@STEP`, join. No I/O, except to follow symbolic links."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from titan_ckpt.errors import UsageError
from titan_ckpt.redaction import redact as redact
from titan_ckpt.redaction import redact_text as redact_text
from titan_ckpt.redaction import redact_values as redact_values

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*)(?:://|::)", re.IGNORECASE)
_AT_STEP = re.compile(r"@(\d+|latest)$")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Location:
    """A run, or one step of it when `step` is not None."""

    url: str
    step: int | None = None

    def __repr__(self) -> str:
        return f"Location(url={redact(self.url)!r}, step={self.step})"

    def __str__(self) -> str:
        return redact(self.url) if self.step is None else f"{redact(self.url)}@{self.step}"


def parse_location(text: str) -> Location:
    """Parse `URL[@STEP]`; the step is None for `@latest` and a bare URL: the newest committed checkpoint.

    >>> parse_location("s3://bucket/run@1200")
    Location(url='s3://bucket/run', step=1200)
    >>> parse_location("memory://run/step-00000020/")
    Location(url='memory://run', step=20)
    """
    if not text.strip():
        raise UsageError("empty URL; give a folder or a URL such as s3://bucket/run, optionally with @STEP")
    match = _AT_STEP.search(text)
    url = normalise(text[: match.start()] if match else text)
    step = int(match.group(1)) if match and match.group(1) != "latest" else None
    folder = re.search(r"/step-(\d{8,})$", url)
    if folder and match is None:
        return Location(url=url[: folder.start()], step=int(folder.group(1)))
    return Location(url=url, step=step)


def scheme(url: str) -> str:
    """The URL's scheme in lower case; `file` for a plain path.

    >>> scheme("s3://b/run"), scheme("/tmp/run"), scheme("file:///tmp/run")
    ('s3', 'file', 'file')
    """
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def local_path(url: str) -> str:
    """The file-system path of a `file` URL or plain path."""
    return url[7:] if url.startswith("file://") else url


def normalise(url: str) -> str:
    """An absolute path or a URL, without trailing slashes; `file://` becomes a plain path."""
    if scheme(url) == "file":
        return os.path.abspath(os.path.expanduser(local_path(url)))
    head, separator, tail = url.partition("://")
    return f"{head.lower()}{separator}{tail.rstrip('/')}"


def join(url: str, *parts: str) -> str:
    """Append `parts` to `url` with single slashes.

    >>> join("s3://b/run/", "step-00000001", "COMMIT.json")
    's3://b/run/step-00000001/COMMIT.json'
    """
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts if part.strip("/"))])


def is_inside(url: str, folder: str) -> bool:
    """Whether `url` is `folder` or inside it; follows symbolic links of local paths.

    >>> is_inside("s3://b/run/copy", "s3://b/run/"), is_inside("s3://b/run-2", "s3://b/run")
    (True, False)
    """
    inner, outer = (os.path.realpath(u) if scheme(u) == "file" else u for u in (normalise(url), normalise(folder)))
    return f"{inner}/".startswith(f"{outer}/")


def check_relative(path: str) -> str:
    """Return `path` if it stays inside its store. UsageError for absolute paths, `..`, NUL and backslashes."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise UsageError(f"{path!r} is not a path inside the run's folder")
    return path


def run_location(url: str) -> Location:
    """Parse the URL of a run; UsageError if it has a step."""
    location = parse_location(url)
    if location.step is not None:
        raise UsageError(f"{location}: give the URL of the run, without a step")
    return location
