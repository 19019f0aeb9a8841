"""The packages, found by their folders, and the one compiled part.

The five folders at the root install as one import package, with the recipes of configs/ as data. The extension is optional:
without a compiler the package installs and does the same in Python. `TITAN_CKPT_PURE=1` leaves it out, for a wheel that fits
every platform.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

FOLDERS = {
    "titan_ckpt": "titan_ckpt",
    "titan_ckpt.trainer": "trainer",
    "titan_ckpt.debug": "debug",
    "titan_ckpt.tui": "tui",
    "titan_ckpt.converters": "converters",
}
RECIPES = {"titan_ckpt.configs": "configs"}  # data alone


def packages() -> list[str]:
    """Every folder below the five that has an `__init__.py`; the links in titan_ckpt/ are not followed."""
    return [
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for init in sorted(Path(folder).glob("**/__init__.py"))
        if not any(parent.is_symlink() for parent in init.parents)
    ]


class SdistWithLinks(sdist):
    """A source archive with the links of titan_ckpt/ as links, so that its tests and checks run from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for folder in (*FOLDERS.values(), *RECIPES.values()):
            if folder != "titan_ckpt":
                os.symlink(f"../{folder}", Path(base_dir, "titan_ckpt", folder))


RING = Extension("titan_ckpt.debug.record._ring", ["debug/record/_ring.c"], optional=True)

setup(
    packages=[*packages(), *RECIPES],
    package_dir=FOLDERS | RECIPES,
    ext_modules=[] if os.environ.get("TITAN_CKPT_PURE") else [RING],
    cmdclass={"sdist": SdistWithLinks},
)
