"""Load what the screens share, in threads, and keep what the user has selected. Imports `data` and `tasks`."""
