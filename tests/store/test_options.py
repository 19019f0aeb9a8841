"""Stores as users of fsspec and s3fs configure them: by a call, by fsspec's files and environment, by the command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import titan_ckpt as tc
from tests.conftest import BUCKET
from tests.store.test_s3 import clean_environment
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import ConditionFailedError, ConfigError, UsageError
from titan_ckpt.store.clients.s3_names import s3_request
from titan_ckpt.store.clients.s3fs_store import S3fsStore
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.s3 import S3Store
from tools.gcs_server import running_gcs

STATE = {"w": torch.arange(4.0)}
S3_URL = "s3://bucket/run"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No AWS environment, no AWS files, no configuration of fsspec."""
    monkeypatch.setattr("os.environ", clean_environment())
    monkeypatch.setattr(fsspec.config, "conf", {})


def options_of(server: Server) -> dict[str, Any]:
    """As pandas and dask users write them."""
    return {
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }


@pytest.mark.s3
@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("more", [{}, {"default_block_size": 5 << 20}], ids=["botocore", "s3fs"])
def test_every_function_takes_storage_options(s3_server: Server, tmp_path: Path, more: dict[str, Any]) -> None:
    url, options = f"s3://{BUCKET}/{tmp_path.name}", options_of(s3_server) | more
    asked: dict[str, Any] = {"storage_options": options}
    with tc.Saver(url, tc.SaveOptions(mirror=f"{url}-mirror"), **asked) as saver:
        saver.save(STATE, step=1)
    tc.save(url, STATE, step=2, **asked)
    assert [info.step for info in tc.list_checkpoints(url, **asked)] == [1, 2]
    opened = tc.open_checkpoint(url, **asked)
    assert isinstance(opened.store, S3fsStore if more else S3Store)
    target = {"w": torch.zeros(4)}
    tc.load(f"{url}-mirror@1", target, **asked)
    assert target["w"].tolist() == [0, 1, 2, 3]
    assert tc.verify(url, read_data=True, **asked) == []
    assert tc.diff(f"{url}@1", opened, **asked) == []
    tc.cp(url, tmp_path / "local", **asked)
    tc.reshard(tmp_path / "local", f"{url}-two", "dp_shard=2", **asked)
    tc.run_plan(tc.plan_reshard(f"{url}@1", "dp_shard=2", **asked), f"{url}-three", **asked)
    tc.convert("to-torch", url, tmp_path / "x.pt", **asked)
    policy = tc.RetentionPolicy(keep_last=1)
    pruned = tc.prune(url, policy, dry_run=False, **asked)
    assert (pruned.steps, pruned.kept) == ([1], ())
    left = tc.list_checkpoints(tc.open_store(url, **options))  # SeaweedFS lists an emptied folder for some minutes
    assert [info.step for info in left if info.state == "committed"] == [2]


@pytest.mark.usefixtures("bare")
def test_the_botocore_client_sends_what_s3fs_would(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {
        "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k", "ACL": "bucket-owner-full-control", "StorageClass": "STANDARD_IA",
        "Tagging": "a=b",
    }  # fmt: skip
    store = tc.open_store(
        S3_URL, anon=True, requester_pays="true", s3_additional_kwargs=json.dumps(more), use_ssl=False
    )
    assert isinstance(store, S3Store)
    client, sent = store._calls.client, dict[str, Any]()
    assert client.meta.endpoint_url.startswith("http://")

    def record(request: Any, operation_name: str, **_: Any) -> None:
        sent[operation_name] = dict(request.headers)
        raise RuntimeError("not sent")

    client.meta.events.register("before-sign.s3", record)
    monkeypatch.setattr(client._request_signer, "_choose_signer", lambda *_, **__: "v4")
    for call in (client.put_object, client.get_object, client.create_multipart_upload):
        with pytest.raises(RuntimeError):
            call(Bucket="b", Key="k")
    names = {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-acl": "bucket-owner-full-control",
        "x-amz-tagging": "a=b",
    }
    for operation in ("PutObject", "CreateMultipartUpload"):
        found = {name.lower(): value for name, value in sent[operation].items()}
        assert names.items() <= found.items()
        assert found["x-amz-storage-class"] == "STANDARD_IA"
    assert {name.lower() for name in sent["GetObject"]} & {"x-amz-request-payer", "x-amz-acl"} == {
        "x-amz-request-payer"
    }


@pytest.mark.usefixtures("bare")
def test_botocore_serves_what_it_can_honour_and_s3fs_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(tc.open_store(S3_URL, anon=True, config_kwargs={"max_pool_connections": 9}), S3Store)
    assert isinstance(tc.open_store(S3_URL, anon=True, version_aware=True), S3fsStore)
    assert isinstance(tc.open_store(S3_URL, anon=True, config_kwargs={"retries": {"max_attempts": 3}}), S3fsStore)
    assert isinstance(tc.open_store(S3_URL, anon=True, client="s3fs"), S3fsStore)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"client: botocore for {S3_URL} (it honours all that was asked, and is faster)"
    assert lines[1] == f"client: s3fs for {S3_URL} (only it honours version_aware)"
    assert lines[2] == f"client: s3fs for {S3_URL} (only it honours config_kwargs['retries'])"
    assert lines[3] == f"client: s3fs for {S3_URL} (as chosen)"
    with pytest.raises(
        ConfigError, match="the botocore client cannot honour version_aware; leave that out, or choose s3fs"
    ):
        tc.open_store(S3_URL, version_aware=True, client="botocore")
    with pytest.raises(UsageError, match="client is 'boto'; did you mean 'botocore'"):
        tc.open_store(S3_URL, client="boto")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "x"}, "unknown option 'endpoint'; did you mean 'endpoint_url'"),
    ({"client_kwargs": {"region": "x"}}, r"client_kwargs: unknown option 'region'; did you mean 'region_name'"),
    (
        {"config_kwargs": {"connect_timout": 3}},
        "config_kwargs: unknown option 'connect_timout'; did you mean 'connect_timeout'",
    ),
    ({"s3_additional_kwargs": {"ServerSideEncription": "x"}}, "did you mean 'ServerSideEncryption'"),
    ({"client": "s3fs", "s3_additional_kwargs": {"acl": "x"}}, "unknown option 'acl'; did you mean 'ACL'"),
    ({"s3_additional_kwargs": {"IfNoneMatch": "*"}}, "unknown option 'IfNoneMatch'"),
    ({"anon": "perhaps"}, "option anon is of type str, or cannot be read; give True or False"),
    ({"client_kwargs": "{"}, "give a mapping, or its JSON"),
    ({"key": True}, "option key is of type bool"),
    ({"key": "a", "access_key": "b"}, "access_key and key are two names of one option"),
    ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "and endpoint_url differ"),
    ({"asynchronous": True}, "an asynchronous file system cannot be used"),
    ({"config_kwargs": {"s3": {"addressing_style": "paht"}}}, "cannot create an S3 client"),
    ({"profile": "no-such-profile"}, "no-such-profile"),
]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("options", "problem"), BAD, ids=str)
def test_a_bad_option_of_s3_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(tc.TitanError, match=problem):
        tc.open_store(S3_URL, **options)


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("memory://run", {"anon": True}, "memory://run: unknown option 'anon'"),
        ("http://127.0.0.1:1/run", {"header": {}}, "did you mean 'headers'"),
        ("simplecache::memory://run", {"cache_storag": "x"}, "did you mean 'cache_storage'"),
        ("simplecache::http://h/run", {"http": {"blocksize": 1}}, "http: unknown option 'blocksize'"),
        ("/tmp/run", {"key": "x"}, "a local folder has no storage options, but key was given"),
        ("memory://run", {"asynchronous": True}, "an asynchronous file system cannot be used"),
    ],
)
def test_a_bad_option_of_another_scheme_is_named(url: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        tc.open_store(url, storage_options=options)


def test_options_without_a_url_that_takes_them_are_refused(tmp_path: Path) -> None:
    tc.save(tmp_path / "run", STATE, step=1)
    opened = tc.open_checkpoint(tmp_path / "run")
    wrong: Any = "key=x"
    calls: list[Callable[[], object]] = [
        lambda: tc.list_checkpoints(tmp_path / "run", storage_options={"key": "x"}),
        lambda: tc.verify(opened, storage_options={"key": "x"}),
        lambda: tc.cp(opened, tmp_path / "copy", storage_options={"key": "x"}),
        lambda: tc.Saver(opened.store, storage_options={"key": "x"}),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no URL of a store that takes options"):
            call()
    with pytest.raises(UsageError, match="storage_options is"):
        tc.open_checkpoint("memory://x", storage_options=wrong)


def test_secrets_in_options_are_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "wJalrXUtnFEMI"
    texts = []
    given: dict[str, Any] = {
        "key": "AKIA",
        "secret": secret,
        "token": secret,
        "s3_additional_kwargs": {"SSECustomerKey": secret},
    }
    for more in ({}, {"client": "s3fs"}, {"endpiont_url": "x"}, {"password": secret}, {"anon": secret}):
        try:
            store = tc.open_store(S3_URL, **(given | more))
            texts.append(f"{store} {store!r} {vars(store)}")
        except tc.TitanError as error:
            texts.append(f"{error} {error.__cause__}")
    texts.append(repr(s3_request(given, "here")))
    assert secret not in " ".join([*texts, caplog.text])


def test_a_file_system_of_the_callers_is_used_as_it_is(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in (f"{tmp_path.name}/a", f"memory://{tmp_path.name}/b"):
        store = tc.open_store(path, filesystem=memory)
        tc.save(store, STATE, step=1)
        assert memory.exists(f"/{tmp_path.name}/{path[-1]}/step-00000001/COMMIT.json")
        assert tc.verify(tc.open_checkpoint(store.url, store=store)) == []
    local = tc.open_store(f"{tmp_path}/run", filesystem=fsspec.filesystem("file"))
    assert isinstance(local, FileStore)
    inner = fsspec.filesystem("dir", path=f"/{tmp_path.name}", fs=memory)
    assert [info.step for info in tc.list_checkpoints(tc.open_store("a", filesystem=inner))] == [1]
    bad: list[tuple[Any, str]] = [
        (fsspec.filesystem("http", asynchronous=True), "filesystem is asynchronous"),
        ("memory", "give an fsspec file system"),
    ]
    for filesystem, problem in bad:
        with pytest.raises(UsageError, match=problem):
            tc.open_store("x", filesystem=filesystem)
    with pytest.raises(UsageError, match="but key was given as well"):
        tc.open_store("x", filesystem=memory, key="x")


@pytest.mark.s3
def test_an_s3fs_file_system_commits_once(s3_server: Server, tmp_path: Path) -> None:
    filesystem = fsspec.filesystem("s3", **options_of(s3_server))
    store = tc.open_store(f"{BUCKET}/{tmp_path.name}", filesystem=filesystem)
    assert store.honours_conditions()
    tc.save(store, STATE, step=1)
    assert filesystem.retries == type(filesystem).retries
    assert [info.step for info in tc.list_checkpoints(store)] == [1]


@pytest.mark.s3
@pytest.mark.parametrize("how", ["json", "ini", "environment", "words"])
def test_commands_find_a_store_as_fsspec_does(s3_server: Server, tmp_path: Path, how: str) -> None:
    folder, words, environment = tmp_path / "fsspec", list[str](), clean_environment()
    folder.mkdir()
    environment |= {"FSSPEC_CONFIG_DIR": str(folder), "HOME": str(tmp_path)}
    client = {"endpoint_url": s3_server.endpoint, "region_name": "us-east-1"}
    if how == "json":
        known = {"key": s3_server.access_key, "secret": s3_server.secret_key, "client_kwargs": client}
        (folder / "conf.json").write_text(json.dumps({"s3": known}))
    elif how == "ini":
        lines = (
            f"key = {s3_server.access_key}",
            f"secret = {s3_server.secret_key}",
            f"endpoint_url = {s3_server.endpoint}",
        )
        (folder / "conf.ini").write_text(
            "\n".join(("[s3]", *lines, "anon = false", f"client_kwargs = {json.dumps(client)}"))
        )
    elif how == "environment":
        environment |= {"FSSPEC_S3_KEY": s3_server.access_key, "FSSPEC_S3_SECRET": s3_server.secret_key}
        environment |= {"FSSPEC_S3_ENDPOINT_URL": s3_server.endpoint, "FSSPEC_S3_ANON": "false"}
    else:
        (tmp_path / "key").write_text(f"{s3_server.secret_key}\n")
        words = [f"--storage-option=key={s3_server.access_key}", "--storage-option", f"secret=@{tmp_path}/key"]
        words += ["--endpoint-url", s3_server.endpoint, "--region=us-east-1", "--client=s3fs"]
    command = [sys.executable, "-m", "titan_ckpt", "-v", "ls", f"s3://{BUCKET}/nothing-{how}", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, "no checkpoint here" in done.stderr) == (3, True), done.stderr
    assert f"client: {'s3fs' if how == 'words' else 'botocore'} for s3://" in done.stderr
    assert s3_server.secret_key not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--storage-option", "secret=abc"], "every user of this machine sees secrets on a command line"),
        (
            ["--storage-option", 'client_kwargs={"aws_secret_access_key":"abc"}'],
            "every user of this machine sees secrets",
        ),
        (
            ["--storage-option", 's3_additional_kwargs={"SSECustomerKey":"abc"}'],
            "every user of this machine sees secrets",
        ),
        (
            ["--storage-option", 'client_kwargs={"headers":{"Authorization":"abc"}}'],
            "every user of this machine sees secrets",
        ),
        (
            ["--storage-option", 'config_kwargs={"proxies":{"http":"http://u:abc@p:9"}}'],
            "every user of this machine sees",
        ),
        (["--endpoint-url", "http://u:abc@127.0.0.1:1"], "this URL holds one. Leave it out"),
        (["http://u:abc@127.0.0.1:1/x"], "this URL holds one. Leave it out"),
        (["--storage-option", "token=env:NO_SUCH_NAME"], "the environment has no NO_SUCH_NAME"),
        (
            ["--storage-option", "token=@/no/such/file"],
            "cannot read /no/such/file (FileNotFoundError), which is to hold token",
        ),
        (["--storage-option", "anon"], "write it as NAME=VALUE"),
        (["--storage-option", "region=a", "--region", "b"], "--region and --storage-option region differ"),
        (["--storage-option", "anno=true"], "unknown option 'anno'; did you mean 'anon'"),
        (["--client", "boto3"], "--client is 'boto3'; did you mean 'botocore'"),
    ],
)
def test_bad_store_arguments_are_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    from titan_ckpt.cli.main import main

    assert main(["ls", S3_URL, *words]) == 2
    shown = capsys.readouterr().err
    assert problem in shown
    assert "abc" not in shown


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("s3.json", '{"s3": {"key": "K", "secret": "SECRET"', "JSONDecodeError, line 1"),
        ("s3.json", '["SECRET"]', "TypeError"),
        ("s3.ini", "secret=SECRET\n", "MissingSectionHeaderError, line 1"),
    ],
)
def test_a_broken_configuration_of_fsspec_is_named(name: str, text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    environment = {**clean_environment(), "FSSPEC_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "titan_ckpt", "ls", "memory://x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, f"{tmp_path}: fsspec cannot read a file there ({kind})" in done.stderr) == (2, True), (
        done.stderr
    )
    assert "SECRET" not in done.stdout + done.stderr


def test_store_arguments_of_a_local_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from titan_ckpt.cli.main import main

    assert main(["--region", "x", "ls", str(tmp_path)]) == 2
    assert "--region: no argument is the URL of a store; local folders have no options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("gs://bucket/run", {"tokn": "x"}, "unknown option 'tokn'; did you mean 'token'"),
        ("gs://bucket/run", {"token": "/no/such/file"}, "option token is neither the path of a key file"),
        ("az://container/run", {"account_nam": "x"}, "did you mean 'account_name'"),
        ("az://container/run", {"account_name": "x", "anon": "perhaps"}, "option anon is of type str"),
        ("az://container/run", {"connection_string": "x"}, "Account must be specified"),
        ("gs://user:word@bucket/run", {}, "names no bucket, or has credentials"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_a_bad_option_of_a_cloud_is_named(url: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        tc.open_store(url, storage_options=options)


def test_two_jobs_on_google_cannot_both_commit() -> None:
    with running_gcs() as token:
        first, second = (tc.open_store("gs://bucket/run", token=token) for _ in range(2))
        tc.save(first, STATE, step=1)
        assert tc.verify(tc.open_checkpoint("gs://bucket/run", storage_options={"token": token}), read_data=True) == []
        with pytest.raises(ConditionFailedError, match="another writer was first"):
            second.write_if("step-00000001/COMMIT.json", b"{}", version=None)
