"""Create an S3 client from options, environment and AWS config files. The only module that handles secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import botocore.exceptions
import botocore.loaders
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config

from titan_ckpt.errors import StoreError
from titan_ckpt.location import redact
from titan_ckpt.store.clients.options import check_known
from titan_ckpt.store.deadline import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from titan_ckpt.store.s3_errors import translate
from titan_ckpt.store.s3_wire import ROOTS, guard

CONNECTIONS = 32
# How the names of parameters begin that a store sets itself, or that would change what its requests mean.
OURS = (
    "Body", "Bucket", "BypassGovernance", "Checksum", "ContentLength", "ContentMD5", "ContinuationToken", "Delete", "Delimiter",
    "EncodingType", "FetchOwner", "If", "Key", "MaxKeys", "MpuObjectSize", "MultipartUpload", "OptionalObject", "PartNumber",
    "Prefix", "Range", "Response", "StartAfter", "UploadId", "VersionId", "WriteOffset",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What `clients.s3_names` makes of the options of `s3://`; None means environment and AWS config files.

    `config_kwargs` are arguments of botocore's Config; `s3_additional_kwargs` go with each request that has such a parameter.
    """

    endpoint_url: str | None = field(default=None, repr=False)
    region: str | None = None
    profile: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    use_ssl: bool | None = None
    verify: bool | str | None = None
    requester_pays: bool = False
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    s3_additional_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)


@cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """botocore's service definitions, parsed once per process: they take 50 of the 55 ms to create a client."""
    return botocore.loaders.create_loader(data_path)


def make_client(options: S3Options, where: str) -> Any:
    """A thread-safe botocore client; `where` is the URL for error messages."""
    try:
        session = botocore.session.Session(profile=options.profile)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        client = session.create_client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region or session.get_config_variable("region") or "us-east-1",
            aws_access_key_id=options.key,
            aws_secret_access_key=options.secret,
            aws_session_token=options.token,
            use_ssl=options.use_ssl is not False,
            verify=options.verify,
            config=_config(options),
        )
    except botocore.exceptions.BotoCoreError as error:
        raise translate(error, f"{where}: cannot create an S3 client") from error
    except (ValueError, TypeError) as error:
        raise StoreError(f"{where}: cannot create an S3 client: {redact(str(error))}") from error
    guard(client)
    extra = {**options.s3_additional_kwargs, **({"RequestPayer": "requester"} if options.requester_pays else {})}
    if extra:
        check_parameters(extra, where)
        client.meta.events.register("provide-client-params.s3", partial(_add_parameters, extra))
    return client


def _config(options: S3Options) -> Config:
    asked = dict(options.config_kwargs)
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "max_pool_connections": CONNECTIONS,
        "tcp_keepalive": True,
        # Each body has our CRC32, so botocore need not sign a SHA-256 of the payload.
        "s3": {"payload_signing_enabled": False, **asked.pop("s3", {})},
        "signature_version": UNSIGNED if options.anon else None,
    }
    return Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Bodies are memoryviews: botocore's type check rejects them, its transport sends them without a copy.
        parameter_validation=False,
        # Each body has our CRC32, so botocore need not add a checksum.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        **(defaults | asked),
    )


def _add_parameters(extra: Mapping[str, Any], params: Mapping[str, Any], model: Any, **_: Any) -> dict[str, Any]:
    """The parameters of a request, with those of `extra` that its operation has, as s3fs does it."""
    return {**{name: value for name, value in extra.items() if name in model.input_shape.members}, **params}


def check_parameters(extra: Mapping[str, Any], where: str) -> None:
    """ConfigError for a name in `s3_additional_kwargs` that no request of a store has as a parameter."""
    service = _loader(None).load_service_model("s3", "service-2")
    shapes = [service["shapes"][service["operations"][name]["input"]["shape"]]["members"] for name in ROOTS]
    names = {member for members in shapes for member in members if not member.startswith(OURS)}
    check_known(extra, frozenset(names), f"{where}: s3_additional_kwargs")
