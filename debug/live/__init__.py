"""Commands for jobs that still run: collect fresh dumps, watch heartbeats. Imports all rooms but drill and cli."""
