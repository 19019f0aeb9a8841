"""The first import of fsspec, which reads its configuration files and fails if one of them is broken."""

from __future__ import annotations

import os

from titan_ckpt.errors import ConfigError


def import_fsspec() -> None:
    """Import fsspec. ConfigError, without their text, which may hold secrets, if its files cannot be read."""
    try:
        import fsspec.config  # noqa: F401
    except ImportError:
        raise
    except Exception as error:  # whatever its parsers raise
        folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.join(os.path.expanduser("~"), ".config", "fsspec")
        number = getattr(error, "lineno", None)
        line = f", line {number}" if isinstance(number, int) else ""
        raise ConfigError(
            f"{folder}: fsspec cannot read a file there ({type(error).__name__}{line}); mend the .json and .ini files in it, "
            "or move them away"
        ) from error
