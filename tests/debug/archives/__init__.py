"""Tests of what the paths of logs say."""
