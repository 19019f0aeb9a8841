"""Whose lines of a text are, where no rule for prefixes tells."""
