"""The version of this release, and where its documentation is."""

__version__ = "0.1.0"
DOCUMENTATION = "https://a-seed-9df771d3.example/titan-ckpt/blob/main/docs"
