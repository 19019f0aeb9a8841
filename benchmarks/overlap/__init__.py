"""Collectives that overlap with products, on slow links."""
