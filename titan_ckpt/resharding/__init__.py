"""Reshard a checkpoint for another mesh, without a process group or torch: choose placements, lay out files, estimate, run.

worker: one of several processes that share a reshard through the target store. record: the JSON beside a complete file.
"""
