"""Tests of reports that other programs write."""
