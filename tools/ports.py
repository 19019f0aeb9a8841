"""Free ports on loopback, as the demo's S3 server finds them."""

from titan_ckpt.demo.ports import HOST, free_port, free_ports

__all__ = ["HOST", "free_port", "free_ports"]
