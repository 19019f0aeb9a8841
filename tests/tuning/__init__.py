"""Tests of fine-tuning: chat data, adapters, models read from folders."""
