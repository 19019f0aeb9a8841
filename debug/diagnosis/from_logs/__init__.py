"""Verdicts from what texts say of other ranks."""
