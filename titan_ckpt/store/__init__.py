"""Bytes under a URL: one protocol, with backends for local disk, S3 and every fsspec scheme. Imports only errors and location.

Terms: object (bytes at a path relative to the store's URL), version (changes whenever the object's bytes do), conditional write
(succeeds only if the object has an expected version), buffer (the caller's memory), part (one buffer of a streamed write, or one
request of a multipart upload), transient (an error that a retry may cure).
"""
