"""Tests of `debug` on jobs that run."""
