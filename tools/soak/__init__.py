"""Parts of scripts/soak.py: jobs that are killed, a ledger of checkpoints, and weather (how often requests fail)."""
