"""Tests of parallel training that need no curve of losses."""
