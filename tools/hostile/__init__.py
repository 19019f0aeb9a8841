"""Campaigns in which whatever the project touches is hostile: one module per part, run by `scripts/hostile.py`."""
