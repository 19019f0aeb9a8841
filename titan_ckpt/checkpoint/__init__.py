"""Find, list and open checkpoints, and read their tensors without torch.

Imports `format` and the rooms below it; readers of foreign formats are registered from above (`foreign_formats`).
Terms: checkpoint (one committed step of a run), info (a step as a listing shows it), foreign (written by another library).
"""
