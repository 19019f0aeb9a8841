"""Drawings and details of data as rows, which stand beside the lists of the screens. Pure."""
