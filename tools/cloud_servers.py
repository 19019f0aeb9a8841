"""Azurite, the emulator of Azure's Blob Storage, on loopback, for the contract of a store: `make stores`.

It is no dependency of the project: `npm install azurite`. Its program is looked for on the path, or given by AZURITE.

python -m tools.cloud_servers -- COMMAND     # runs COMMAND with TITAN_CKPT_TEST_STORES and the connection string
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import formatdate

from titan_ckpt.demo.ports import free_ports

ACCOUNT = "devstoreaccount1"
# The account key that Azurite documents for everyone.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BUCKET = "titan-tests"
READY_WITHIN_S = 60.0


def create_container(endpoint: str, name: str) -> None:
    """`Create Container`, authorised by Shared Key (learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key)."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
    signed = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", data=b"")
    for header, value in (("x-ms-date", date), ("x-ms-version", version)):
        request.add_header(header, value)
    request.add_header("Content-Type", "")
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}")
    urllib.request.urlopen(request, timeout=5).close()


def _until(action: Callable[[], None], process: subprocess.Popen[bytes], what: str) -> None:
    give_up_at = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            return action()
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > give_up_at or process.poll() is not None:
                raise RuntimeError(f"{what} did not start: {error}") from error
            time.sleep(0.2)


def main(words: list[str]) -> int:
    """Start Azurite, run the command, stop it."""
    command = words[words.index("--") + 1 :]
    azurite = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if azurite is None:
        sys.stderr.write("azurite-blob is not installed: npm install azurite, and give its path as AZURITE\n")
        return 1
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    flags = [
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--inMemoryPersistence",
        "--blobPort",
        str(port),
    ]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([azurite, *flags], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            _until(lambda: create_container(endpoint, BUCKET), process, "azurite")
            pairs = {"AccountName": ACCOUNT, "AccountKey": KEY, "BlobEndpoint": endpoint}
            connection = ";".join(f"{name}={value}" for name, value in pairs.items())
            environment = {**os.environ, "AZURE_STORAGE_CONNECTION_STRING": connection, "TITAN_CKPT_TEST_STORES": "az"}
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
