"""The packages, found by their folders, and the one compiled part.

The five folders at the root install as one import package. The extension is optional: without a compiler the package installs and
does the same in Python.
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDERS = {
    "titan_ckpt": "titan_ckpt",
    "titan_ckpt.trainer": "trainer",
    "titan_ckpt.debug": "debug",
    "titan_ckpt.tui": "tui",
    "titan_ckpt.converters": "converters",
}


def packages() -> list[str]:
    """Every folder below the five that has an `__init__.py`; the links in titan_ckpt/ are not followed."""
    return [
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for init in sorted(Path(folder).glob("**/__init__.py"))
        if not any(parent.is_symlink() for parent in init.parents)
    ]


setup(
    packages=packages(),
    package_dir=FOLDERS,
    ext_modules=[Extension("titan_ckpt.debug.record._ring", ["debug/record/_ring.c"], optional=True)],
)
