"""Checkpoints for training loops of other libraries: a module for each, which alone imports that library."""
