"""The debugger and the terminal screens on large jobs."""
