"""The rooms and the arrows between them: read from pyproject.toml, held by `make check`, drawn for docs/design.md."""
