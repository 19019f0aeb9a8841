"""Clients of stores beside local disks and botocore's S3: s3fs, obstore, and what each is asked for."""
