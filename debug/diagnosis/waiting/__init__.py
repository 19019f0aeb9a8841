"""Who waits for whom, circles of waits, and what those that are waited for do."""
