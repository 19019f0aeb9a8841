"""Model knowledge without I/O: specs, families, tensor names in each layout, transforms, and the checks of names and shapes.

spec: the fields that decide a decoder's logits. layout: how a trainer names tensors. named: one tensor under both names.
"""
