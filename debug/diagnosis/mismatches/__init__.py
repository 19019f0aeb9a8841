"""Ranks that met with operations that do not match."""
