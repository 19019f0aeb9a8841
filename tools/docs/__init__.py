"""Generators of the reference pages docs/api.md and docs/cli.md."""
