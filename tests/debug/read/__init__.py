"""Tests of `debug/read` on logs and folders as others write them."""
