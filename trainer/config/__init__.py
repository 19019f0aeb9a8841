"""The TOML config of a run: reading, checking, printing. Imports `parallel` and `model`, whose tables it contains."""
