"""URLs of runs and checkpoints: parse `URL@STEP`, join. No I/O, except to follow symbolic links, to see a file
where a folder belongs, and to look for what a mistyped path meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from titan_ckpt.arguments import check_type, nearest
from titan_ckpt.errors import UsageError
from titan_ckpt.redaction import is_credential as is_credential
from titan_ckpt.redaction import redact as redact
from titan_ckpt.redaction import redact_text as redact_text
from titan_ckpt.redaction import redact_values as redact_values

StrPath: TypeAlias = str | os.PathLike[str]
"""What every public function takes for a URL: text, or a path object for a local folder."""

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*)(?:://|::)", re.IGNORECASE)
_LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)  # fsspec's two names of the local disk
_AT_STEP = re.compile(r"@([0-9]+|latest)\Z")
_STEP_FOLDER = re.compile(r"step-[0-9]{8,}")
_ATTEMPT_FOLDER = re.compile(r"a-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")
_ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)
_MOST_NAMES = 10_000
_STORES = "s3|s3a|gs|gcs|az|abfss?|https?|memory|file|hf"
_MISTYPED = re.compile(rf"({_STORES})(//|:(?!//|:))/*", re.IGNORECASE)  # s3//bucket, s3:/bucket, s3:bucket
# Files and folders that titan-ckpt itself makes in a run.
RESERVED_NAMES = frozenset(
    {"COMMIT.json", "OWNER.json", "manifest.json", "digests.bin", ".metadata", "pins.txt", "unmirrored.txt"}
)
_GIVE = "a folder or a URL such as s3://bucket/run, as text or as a pathlib.Path"
MAX_STEP = 10**15  # below 2**53, which every JSON reader keeps exact


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Location:
    """A run, or one step of it when `step` is not None."""

    url: str
    step: int | None = None

    def __repr__(self) -> str:
        return f"Location(url={redact(self.url)!r}, step={self.step})"

    def __str__(self) -> str:
        return redact(self.url) if self.step is None else f"{redact(self.url)}@{self.step}"


def url_text(url: StrPath, name: str = "the URL") -> str:
    """`url` as text. UsageError for another type, and for a path object made of a URL, which has lost a slash.

    >>> from pathlib import Path
    >>> url_text(Path("/data/run")), url_text("s3://bucket/run")
    ('/data/run', 's3://bucket/run')
    """
    check_type(url, name, str, os.PathLike, hint=_GIVE)
    text = os.fspath(url)
    check_type(text, name, str, hint=_GIVE)
    if text != url and _ONE_SLASH.match(text):
        raise UsageError(f"{redact(text)}: a path object drops one slash of a URL; give URLs as text")
    if not text.strip():
        raise UsageError(f"empty URL; give {_GIVE}")
    if text.startswith(("::", "://")):
        raise UsageError(f"{redact(text)}: names no scheme before `{text[:2]}`; give {_GIVE}")
    if (mistyped := _MISTYPED.match(text)) is not None:
        meant = f"{mistyped[1].lower()}://{'/' if mistyped[1].lower() == 'file' else ''}{text[mistyped.end() :]}"
        raise UsageError(
            f"{redact(text)}: did you mean {redact(meant)}? A folder of that name is written ./{redact(text)}"
        )
    if "\0" in text:
        raise UsageError(f"{name} is {redact(text)[:200]!r}; no URL contains a NUL character")
    return text


def parse_location(url: StrPath) -> Location:
    """Parse `URL[@STEP]`; the step is None for `@latest` and a bare URL: the newest committed checkpoint.

    >>> parse_location("s3://bucket/run@1200")
    Location(url='s3://bucket/run', step=1200)
    >>> parse_location("memory://run/step-00000020/")
    Location(url='memory://run', step=20)
    """
    text = url_text(url)
    match = _AT_STEP.search(text)
    if match is not None and not match.start():
        raise UsageError(f"{redact(text)!r} names a step of no run; give {_GIVE}, before the @")
    found = normalise(text[: match.start()] if match else text)
    if match is not None:
        return Location(url=found, step=None if match.group(1) == "latest" else _step(match.group(1), text))
    run, _, name = found.rpartition("/")
    if _STEP_FOLDER.fullmatch(name):
        return Location(url=run, step=_step(name.removeprefix("step-"), text))
    return Location(url=found)


def _step(digits: str, text: str) -> int:
    if len(digits) > len(str(MAX_STEP)) or int(digits) > MAX_STEP:
        raise UsageError(f"{redact(text)[:200]}: no step is larger than {MAX_STEP}")
    return int(digits)


def check_writable(url: StrPath) -> None:
    """UsageError unless a run that is saved at `url` can be opened by that same URL; nothing is written before this check."""
    url = url_text(url)
    problem = _why_unwritable(url)
    if problem:
        raise UsageError(
            f"{redact(url)!r}: {problem}. Expected a folder or the URL of a run, such as s3://bucket/runs/a"
        )


def _file_in(url: str) -> str:
    """The file that stands where a local URL needs a folder; "" if none does."""
    path = local_path(url) if scheme(url) == "file" else ""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path if os.path.isfile(path) else ""


def _why_unwritable(url: str) -> str:
    if not url.isprintable():
        return "it has a control character or another character that cannot be printed"
    if "?" in url and scheme(url) == "file":
        return "its name has a `?`, where the query of a URL begins, which messages hide"
    if "?" in url or ("#" in url and scheme(url) != "file"):
        return "a run's URL has no query and no fragment; put a client's options into its own configuration"
    if _ONE_SLASH.match(url):
        return "one slash after the scheme; a URL has two"
    found = normalise(url)
    for text in (url, found):
        if parse_location(text) != Location(url=found):
            return "this addresses one step of a run (or @latest); a job saves to the run itself, and gives the step besides"
    if (local := _LOCAL.match(url)) is not None and not local_path(url).startswith(("/", "~")):
        return f"the part after {local[0]} must be an absolute path"
    names = found.partition("://")[2].split("/") if "://" in found else found.strip("/").split("/")
    if is_in_step(names):
        return "it lies inside the folder of a step, which is deleted with its step"
    if "://" in found and any(name in ("", ".", "..") for name in names[1:]):
        return "it has an empty name, `.` or `..` between slashes"
    if not found.strip("/"):
        return "it is the root of the file system"
    if file := _file_in(found):
        return f"{file} is a file, and a run is a folder"
    if names[-1] != names[-1].strip():
        return "its name begins or ends with a space"
    return "its name is that of a file that titan-ckpt writes" if names[-1] in RESERVED_NAMES else ""


def is_in_step(names: Iterable[str]) -> bool:
    """Whether one of the names of a path is that of a step's folder, or of an attempt to save one."""
    return any(_STEP_FOLDER.fullmatch(name) or _ATTEMPT_FOLDER.fullmatch(name) for name in names)


def absence(url: StrPath) -> str:
    """`it does not exist; did you mean 'runs'?` of a local path at which nothing is; "" of any other.

    >>> absence("/no/such/run")
    'it does not exist; there is no folder /no/such'
    """
    path = local_path(normalise(url))
    if scheme(normalise(url)) != "file" or os.path.lexists(path):
        return ""
    return f"it does not exist; {meant(path) or 'check the path'}"


def meant(path: str) -> str:
    """`did you mean 'runs'?`, or which folder is missing too, of a local path that does not exist; "" if nothing is like it."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    except OSError:
        return "" if os.path.isdir(folder) else f"there is no folder {folder}"
    return nearest(name, names).rstrip()


def scheme(url: str) -> str:
    """The URL's scheme in lower case; `file` for a plain path and for `local://`.

    >>> scheme("s3://b/run"), scheme("/tmp/run"), scheme("file:///tmp/run")
    ('s3', 'file', 'file')
    """
    match = None if _LOCAL.match(url) else _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def local_path(url: str) -> str:
    """The file-system path of a `file` URL or plain path.

    >>> local_path("file:///tmp/run"), local_path("local:///tmp/run"), local_path("runs/a")
    ('/tmp/run', '/tmp/run', 'runs/a')
    """
    return _LOCAL.sub("", url, count=1) if _LOCAL.match(url) else url


def normalise(url: StrPath) -> str:
    """An absolute path or a URL, without trailing slashes; `file://` and `local://` become a plain path."""
    url = url_text(url)
    if scheme(url) == "file":
        return _absolute(os.path.expanduser(local_path(url)))
    head, separator, tail = url.partition("://")
    return f"{head.lower()}{separator}{tail.rstrip('/')}"


def _absolute(path: str) -> str:
    """An absolute path to what the kernel finds at `path`: `..` behind a link is the parent of what the link leads to."""
    try:
        if ".." not in path.split("/"):
            return os.path.abspath(path)
        place = "/" if path.startswith("/") else os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: the working folder is gone; change to another one, or give an absolute path"
        ) from error
    for name in path.split("/"):
        if name == "..":
            place = os.path.dirname(os.path.realpath(place) if os.path.islink(place) else place)
        elif name not in ("", "."):
            place = os.path.join(place, name)
    return place


def join(url: str, *parts: str) -> str:
    """Append `parts` to `url` with single slashes.

    >>> join("s3://b/run/", "step-00000001", "COMMIT.json")
    's3://b/run/step-00000001/COMMIT.json'
    """
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts if part.strip("/"))])


def is_inside(url: StrPath, folder: StrPath) -> bool:
    """Whether `url` is `folder` or inside it; follows symbolic links of local paths.

    >>> is_inside("s3://b/run/copy", "s3://b/run/"), is_inside("s3://b/run-2", "s3://b/run")
    (True, False)
    """
    inner, outer = (os.path.realpath(u) if scheme(u) == "file" else u for u in map(normalise, (url, folder)))
    return f"{inner}/".startswith(f"{outer}/")


def check_relative(path: str) -> str:
    """Return `path` if it stays inside its store. UsageError for absolute paths, `..`, NUL and backslashes."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise UsageError(f"{path!r} is not a path inside the run's folder")
    return path


def run_location(url: StrPath) -> Location:
    """Parse the URL of a run; UsageError if it has a step."""
    location = parse_location(url)
    if location.step is not None or location.url != normalise(url):
        raise UsageError(f"{redact(url_text(url))}: give the URL of the run, without a step")
    return location
