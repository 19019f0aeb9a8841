"""The one compiled part, optional: without a compiler the package installs, and does the same in Python."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("titan_ckpt.debug._ring", ["debug/_ring.c"], optional=True)])
