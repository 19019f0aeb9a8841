"""Create an S3 client from options, environment and AWS config files. The only module that handles secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import botocore.exceptions
import botocore.loaders
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config

from titan_ckpt.errors import ConfigError, StoreError
from titan_ckpt.location import redact
from titan_ckpt.store.s3_errors import translate
from titan_ckpt.store.s3_wire import guard

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Options of `open_store("s3://...", **options)`; None means environment and AWS config files."""

    endpoint_url: str | None = field(default=None, repr=False)
    region: str | None = None
    profile: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S

    @staticmethod
    def of(options: Mapping[str, Any]) -> S3Options:
        """Parse `options`; ConfigError for an unknown name."""
        known = [f.name for f in fields(S3Options)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown S3 option {name!r}; the options are {', '.join(known)}")
        return S3Options(**options)


@cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """botocore's service definitions, parsed once per process: they take 50 of the 55 ms to create a client."""
    return botocore.loaders.create_loader(data_path)


def make_client(options: S3Options, where: str) -> Any:
    """A thread-safe botocore client; `where` is the URL for error messages."""
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # Bodies are memoryviews: botocore's type check rejects them, its transport sends them without a copy.
        parameter_validation=False,
        # Each body has our CRC32, so botocore need not add a checksum or sign a SHA-256 of the payload.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
        signature_version=UNSIGNED if options.anonymous else None,
    )
    try:
        session = botocore.session.Session(profile=options.profile)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        client = session.create_client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region or session.get_config_variable("region") or "us-east-1",
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            aws_session_token=options.session_token,
            config=config,
        )
    except botocore.exceptions.BotoCoreError as error:
        raise translate(error, f"{where}: cannot create an S3 client") from error
    except ValueError as error:
        raise StoreError(f"{where}: cannot create an S3 client: {redact(str(error))}") from error
    guard(client)
    return client
