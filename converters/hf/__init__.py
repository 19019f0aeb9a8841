"""Hugging Face models: read in place, import, export, verify. May import `converters.models`."""
