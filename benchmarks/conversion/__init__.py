"""Conversion to and from Hugging Face, and round trips through transformers and torchtitan."""
