"""Estimates, predicted speed and plans, before there are accelerators."""
