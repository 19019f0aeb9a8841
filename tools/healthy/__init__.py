"""Healthy jobs, and looks at them while they run."""
