"""The trainer beside torchtitan and transformers, across meshes, and its own overhead."""
