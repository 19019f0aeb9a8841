"""The library that each scheme needs, and the pip command that installs it."""

from __future__ import annotations

from titan_ckpt.errors import MissingExtraError, TitanError, UsageError

# Scheme: (library, extra of ours that brings it).
EXTRAS = {
    "s3": ("botocore or s3fs", "s3"), "s3a": ("botocore or s3fs", "s3"), "gs": ("obstore", "gs"), "gcs": ("obstore", "gs"),
    "az": ("obstore", "az"), "abfs": ("obstore", "az"), "abfss": ("obstore", "az"),
}  # fmt: skip
# Scheme: what pip installs (fsspec/registry.py names the libraries).
LIBRARIES = {
    "sftp": "paramiko", "ssh": "paramiko",
    "http": "aiohttp requests", "https": "aiohttp requests", "hf": "huggingface_hub",
    "webdav": "webdav4[fsspec]", "smb": "smbprotocol", "hdfs": "pyarrow", "arrow_hdfs": "pyarrow", "webhdfs": "requests",
    "oci": "ocifs", "ocilake": "ocifs", "oss": "ossfs", "tos": "tosfs", "dropbox": "dropboxdrivefs requests dropbox",
    "git": "pygit2", "github": "requests", "gist": "requests", "gdrive": "gdrive-fsspec", "box": "boxfs",
    "lakefs": "lakefs-spec", "wandb": "wandbfs", "dbfs": "requests", "jupyter": "requests", "jlab": "requests",
    "libarchive": "libarchive-c", "root": "fsspec-xrootd", "asynclocal": "morefs[asynclocalfs]",
    "dvc": "dvc", "dask": "distributed",
}  # fmt: skip


def missing_library(scheme: str, where: str, error: ImportError) -> TitanError:
    """The error for a scheme whose library cannot be imported."""
    if scheme in EXTRAS:
        library, extra = EXTRAS[scheme]
        return MissingExtraError(library, extra, where)
    if scheme in LIBRARIES:
        return UsageError(
            f"{where}: {scheme}:// needs a library that is not installed: pip install '{LIBRARIES[scheme]}'"
        )
    name = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) and error.name else ""
    return UsageError(f"{where}: {scheme}:// needs a library that is not installed ({error}){name}")
