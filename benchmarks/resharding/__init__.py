"""Resharding time, memory and planning, and resuming across meshes."""
