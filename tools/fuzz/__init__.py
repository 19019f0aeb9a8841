"""Fuzzing of everything that reads bytes of others: families of inputs, mutations by structure, coverage as feedback."""
