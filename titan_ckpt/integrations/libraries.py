"""Errors about the library that a loop comes from."""

from __future__ import annotations

from titan_ckpt.errors import UsageError


def not_importable(library: str, error: ImportError) -> UsageError:
    """The error for a module here whose library is missing, or is a release that lacks what is imported from it."""
    name = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name == library:
        return UsageError(
            f"titan_ckpt.integrations.{library} needs {library}, which is not installed: pip install {library}"
        )
    return UsageError(
        f"titan_ckpt.integrations.{library}: {library} is installed, but cannot be imported as this release needs it: {error}. "
        f"docs/loops.md lists the releases that were tested"
    )
