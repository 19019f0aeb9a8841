"""`titan-ckpt demo`: the whole workflow on this machine, with a real S3 server."""
