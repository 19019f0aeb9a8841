"""Check, build and try out a release; nothing is published."""
