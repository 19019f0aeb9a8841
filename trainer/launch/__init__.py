"""Before and around the ranks: checks, estimates, starting ranks and explaining their failures. Imports `data` and below."""
