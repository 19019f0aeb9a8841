"""Chat templates and made-up conversations, compared token by token with transformers."""
