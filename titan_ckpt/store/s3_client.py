"""How an S3 client is made: options, environment, AWS config files, time limits. The only place that sees secrets."""

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

from titan_ckpt.errors import ConfigError
from titan_ckpt.store.s3_errors import translate

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What may be given to `open_store("s3://...", **options)`; what is None comes from the environment and AWS config."""

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
        """The options, unknown names refused."""
        known = [f.name for f in fields(S3Options)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown S3 option {name!r}; the options are {', '.join(known)}")
        return S3Options(**options)


@cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """botocore's descriptions of S3, parsed once per process: 50 ms of a client's 55."""
    return botocore.loaders.create_loader(data_path)


def make_client(options: S3Options, where: str) -> Any:
    """A thread-safe botocore client; `where` is for messages."""
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # Bodies are memoryviews, which botocore's check of types does not know but its transport sends without a copy.
        parameter_validation=False,
        # We send a CRC32 with every body, so neither botocore's checksum nor a SHA-256 of the payload is needed on top.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
        signature_version=UNSIGNED if options.anonymous else None,
    )
    try:
        session = botocore.session.Session(profile=options.profile)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        return session.create_client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region or session.get_config_variable("region") or "us-east-1",
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            aws_session_token=options.session_token,
            config=config,
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise translate(error, f"{where}: cannot make an S3 client") from error
