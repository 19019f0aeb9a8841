"""Tests of the code base itself: imports, sizes, packaging, the benchmark suite."""
