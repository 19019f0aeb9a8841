"""Weights stored in blocks with a scale each, read as plain floating-point tensors.

Terms: packed (as stored: values of 4 or 8 bits), scale (what a block is multiplied by), plain (the values multiplied out).
"""
