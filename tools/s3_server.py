"""The S3 server of `titan-ckpt demo`, which tests, scripts and benchmarks use as well."""

from titan_ckpt.demo.s3_server import Server, running_server

__all__ = ["Server", "running_server"]
