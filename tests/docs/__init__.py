"""Tests that the pages, examples and golden files are correct."""
