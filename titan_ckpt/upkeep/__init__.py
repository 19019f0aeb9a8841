"""Maintain a run's checkpoints: ownership, retention, deletion, copies. No torch.

Imports `check`, `checkpoint` and the rooms below them. Terms: claim (the token of the job that owns a run), pin (a step that
retention never deletes), garbage (objects to delete).
"""
