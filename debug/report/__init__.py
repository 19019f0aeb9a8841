"""Verdicts for people and for programs: text, JSON, what a launcher should do. Pure."""
