"""How jobs and ranks end, and who is only a victim of that."""
