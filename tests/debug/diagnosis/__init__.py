"""Exact tests of the rules of the analyzer, on jobs of a few operations."""
