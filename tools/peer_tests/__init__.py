"""PyTorch's own tests of distributed checkpoints, run with torch's storage and with ours in its place."""
