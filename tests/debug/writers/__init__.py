"""Whose lines of a text are."""
