"""Drills: hang a small real job on purpose, diagnose it, compare with the truth. Imports all rooms but live and cli."""
