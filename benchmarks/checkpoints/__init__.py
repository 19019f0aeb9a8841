"""Save, load and store speed beside DCP, obstore, s3fs and torchtitan."""
