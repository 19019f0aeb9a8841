"""No secret survives redaction, whatever it is made of and however it is written; what is around it stays readable."""

from __future__ import annotations

import json
import shlex
import string
import time
from collections.abc import Callable

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from titan_ckpt.redaction import redact, redact_text, redact_values
from tools.hostile.secrets import run_secrets
from tools.paths import DATA

PRINTABLE = string.ascii_letters + string.digits + string.punctuation
NAMES = (
    "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "password", "db-password", "client_secret", "accessToken", "apiKey",
    "AccountKey", "private_key", "session_token", "SharedAccessSignature", "PGPASSWORD", "sas_token", "OPENAI_API_KEY",
)  # fmt: skip

# Shapes in which a secret of any printable characters without spaces stands unquoted.
RAW: dict[str, Callable[[str], str]] = {
    "user info": lambda s: f"PUT https://AKIAUSER:x{s}@host.example/bucket/key: certificate verify failed",
    "user info of a store": lambda s: f"s3://key:x{s}@bucket/run@1200: certificate verify failed",
    "query": lambda s: f"GET https://host.example/bucket/key?sv=1&sig=x{s}x: certificate verify failed",
    "azure query with colons": lambda s: (
        f"GET https://host.example/bucket?se=2026-01-01T00:00:00Z&sig=x{s}x&sp=r: certificate verify failed"
    ),
    "header": lambda s: f"host.example bucket\nAuthorization: Bearer x{s}\ncertificate verify failed",
    "environment": lambda s: f"host.example bucket\nHF_TOKEN=x{s}x certificate verify failed",
    "yaml line": lambda s: f"host: host.example bucket\n  password: x{s}x\ncertificate verify failed",
    "option": lambda s: f"host.example bucket --api-key x{s}x certificate verify failed",
    "xml": lambda s: f"host.example bucket <SecretAccessKey>x{s.replace('<', '_')}x</SecretAccessKey> certificate verify failed",
}  # fmt: skip

# Shapes that quote, where a secret may have spaces, too.
QUOTED: dict[str, Callable[[str, str], str]] = {
    "json": lambda n, s: json.dumps({"host": "host.example", n: s, "reason": "certificate verify failed"}),
    "nested json": lambda n, s: json.dumps(
        {"env": json.dumps({n: s, "bucket": 1}), "reason": "host.example certificate verify failed"}
    ),
    "repr": lambda n, s: repr({"host": "host.example", "nested": {n: s}, "reason": "certificate verify failed"}),
    "call": lambda n, s: f"connect('host.example', {n.replace('-', '_')}={s!r}): certificate verify failed",
    "toml": lambda n, s: f'host = "host.example"\n{n} = {json.dumps(s)}\nreason = "certificate verify failed"',
    "yaml": lambda n, s: yaml.safe_dump({"host": "host.example", n: s, "reason": "certificate verify failed"}, width=10**6),
    "shell": lambda n, s: f"host.example export {n}={shlex.quote(s + ' ')} certificate verify failed".replace("'\"'\"'", "_"),
}  # fmt: skip


def leaks(secret: str, shown: str, around: str) -> list[str]:
    """Parts of the secret, of four characters or more, that are shown and are not part of what is around it."""
    parts = {secret[at : at + 4] for at in range(len(secret) - 3)}
    return sorted(part for part in parts if part in shown and part not in around and "***" not in part)


@pytest.mark.parametrize("shape", RAW)
def test_no_unquoted_secret_survives(shape: str) -> None:
    @settings(max_examples=150, deadline=None)
    @example("pa/ss@wo:rd?#")
    @example("'\"`;,)]}>")
    @example("se://x@y/z")
    @given(st.text(PRINTABLE, min_size=6, max_size=40))
    def check(secret: str) -> None:
        text = RAW[shape](secret)
        shown = redact_text(text)
        assert leaks(secret, shown, RAW[shape]("")) == [], (text, shown)
        assert "certificate verify failed" in shown, (text, shown)
        assert "bucket" in shown, (text, shown)

    check()


@pytest.mark.parametrize("shape", QUOTED)
def test_no_quoted_secret_survives(shape: str) -> None:
    @settings(max_examples=150, deadline=None)
    @example("password", "a' b\" c\\")
    @given(st.sampled_from(NAMES), st.text(PRINTABLE + " ", min_size=6, max_size=40))
    def check(name: str, secret: str) -> None:
        text = QUOTED[shape](name, secret)
        shown = redact_text(text)
        assert leaks(secret, shown, QUOTED[shape](name, "")) == [], (text, shown)
        assert "host.example" in shown, (text, shown)
        assert "certificate verify failed" in shown, (text, shown)

    check()


@pytest.mark.parametrize("shape", ["json", "nested json"])
def test_json_stays_json(shape: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(NAMES), st.text(PRINTABLE + " \n\t", min_size=6, max_size=40))
    def check(name: str, secret: str) -> None:
        json.loads(redact_text(QUOTED[shape](name, secret)))

    check()


@settings(max_examples=200, deadline=None)
@given(st.text(PRINTABLE, min_size=6, max_size=40))
def test_a_url_alone_shows_host_and_path(secret: str) -> None:
    shown = redact(f"s3://key:x{secret}@bucket/run?sig={secret}")
    assert leaks(secret, shown, "s3://***@bucket/run?***") == []
    assert "@bucket/run" in shown or "***" in shown


PIECES_OF_LINES = [
    "password: |", "  a8Kd", "token:", "- ", '"key": {', "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----",
    "https://u:p", "@h/x?",
    'token="""', "secret=(", ")", "name: HF_TOKEN", "value: x9", "Private-Lines: 2", "kind: Secret", "data:",
    "machine a login b password c",
    "<token>", "</token>", "[r0]:", " ", "%3A%2F%2Fa%40", "Bearer a1b2c3d4", "\\u0074oken=1", "A" * 20,
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.text(min_size=6, max_size=40), VALUES)
def test_secrets_of_nested_values_are_hidden_by_name(name: str, secret: str, other: object) -> None:
    shapes = [
        {"a": [{name: secret, "o": other}]},
        {name: {"x": [secret, other]}},
        {"env": [{"name": name, "value": secret}]},
        {"argv": ["run", f"--{name}", secret]},
        [[name, secret]],
        {"text": json.dumps({name: secret})},
    ]
    for value in shapes:
        shown = json.dumps(redact_values(value))
        assert "***" in shown, value
        assert json.dumps(secret)[1:-1] not in shown or json.dumps(secret)[1:-1] in json.dumps(other), value


TOKENS = [
    "AKIAIOSFODNN7EXAMPLE", "hf_" + "aB3" * 11, "ghp_" + "aB3" * 12, "github_pat_" + "a1_B" * 10, "sk-proj-" + "aB3-" * 8,
    "xoxb-1234567890-abcdefghij", "AIza" + "Sy0-" * 9, "ya29." + "a0Af-" * 5, "GOOG1E" + "ABC123" * 9, "glpat-" + "aB3_" * 6,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "IQoJb3JpZ2luX2VjE" + "aB3/" * 30, "npm_" + "aB3" * 12,
]  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_with_a_known_mark_are_hidden_anywhere(token: str) -> None:
    assert redact_text(f"step 3 ({token}) failed") == "step 3 (***) failed"


def test_a_private_key_is_hidden_with_its_lines() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ==\n-----END PRIVATE KEY-----"
    for text in (key, json.dumps({"k": key})):
        assert "MIIE" not in redact_text(text)
        assert "kqhk" not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run@1200: 7 of 8 ranks reported", "step 3: tokens: 1200, tokens/s: 31.5, num_tokens=7",
        "model.layers.0.attention.wq.weight: global shape (4096, 4096)", '{"eos_token": "</s>", "max_tokens": 5}',
        "http://localhost:9000/bucket/run@latest is down", "https://host:443: connection refused by host:80",
        "no URL? here a@b", "hf://org/model@main/config.json", "unknown key model.n_layers; did you mean n_layer?",
        "digest 0123456789abcdef0123456789abcdef01234567 differs", "TLS failed: unable to get local issuer certificate",
        "token=None, password=null", "rank 3 dp_shard1 tp1 12:30:05 author: me, signal: SIGTERM", "memory://run/step-00000001",
        "tokenizer: data/tokenizer.json, key: model.embed_tokens.weight", "Basic validation of the header passed",
    ],
)  # fmt: skip
def test_text_without_secrets_is_not_changed(text: str) -> None:
    assert redact_text(text) == text


@settings(max_examples=100, deadline=None)
@given(st.text(PRINTABLE + " \n", max_size=120))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact_text(text)
    assert len(redact_text(once)) <= len(once) + 40


def test_no_notation_in_any_carrier_shows_a_secret() -> None:
    """A seeded sample of `make hostile ARGS=secrets`: 584 texts."""
    outcome = run_secrets(seed=1, seconds=0.0)
    assert outcome.cases > 500
    assert outcome.failures == []


ORDINARY = [
    "SSL: CERTIFICATE_VERIFY_FAILED certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)",
    "the token is required for gated repos", "Password required", "token expired", "expected one of 'token', 'text', 'label'",
    "forward pass: 12.3 ms, backward pass: 30 ms", "pass: 3, fail: 2", "ssh -p 22 host", "docker run -p 8080:80 img",
    "local-rank: 3 on local-7f3c9e21", "npm install failed", "sk-learn at /usr/lib", "commit 7f3c9e2107d2a", "cache_key: abc",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "primary_key=12",
    "path=/a/b, pattern: foo, keys: 3",
    "This is no secret: the loss went up after step 400.", "Bad credentials: check the profile",
    "error in token: unexpected end of file", "what is a token: a unit of text", "a wrong password: see the page on stores",
    "NCCL INFO Channel 00/02 : 0 1 2 3", "step 12 loss 3.4 tokens/s 1200 lr 3e-4",
    'File "/a/secret_manager.py", line 3, in get_secret',
    "['token', 'embedding', 'pass']", "s3%3A%2F%2Fbucket%2Frun%401200", "name: layers.0.wq.weight\nvalue: 3",
    "kind: Pod\ndata:\n  a: b",
    "\\u00e9t\\u00e9 and \\x1b[31m", "-----BEGIN CERTIFICATE-----\nMIIBszCCARygAwIBAgIBADANBgkqhkiG\n-----END CERTIFICATE-----",
    "login failed: try again", "config set to 5", "{'tokens': ['internationalisation', '<|endoftext|>'], 'ids': [3, 4]}",
    "curl -sS https://host/x -o y", "mysql -u root db", "model.layers.0.self_attn.k_proj.weight: key value heads 4",
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_log_lines_stay(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "text",
    ["my password: the7th", "my password: a", "a token: the\nrest", "login token=the-one", "my secret: 'the one'"],
)
def test_a_value_that_begins_like_prose_is_hidden(text: str) -> None:
    assert redact_text(text).count("***") == 1


def test_nothing_of_the_recorded_logs_is_hidden() -> None:
    """Logs of real hung and crashed jobs have no secrets, and stay as they are."""
    for path in sorted(DATA.rglob("*.log")):
        text = path.read_text(errors="replace")
        assert redact_text(text) == text, path


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*PIECES_OF_LINES, "\n"]), max_size=40).map("".join))
def test_a_redacted_text_has_the_lines_of_the_original(text: str) -> None:
    assert redact_text(text).count("\n") == text.count("\n")


PIECES = [
    "a", "://", "x://u:", "x://u:p@", "a://b:x://", "a://b:x", "'a://b?' ", "a://b?", "@", "?", "token=", "token=a;", "token='",
    'token="""', "token=[", "token=[ ", "token=a ", "password: ", "\\", "-", "--token ", "<", "<a", "<token>", "[", "hf_", "sk-",
    "-----BEGIN PRIVATE KEY-----", "eyJaaaaaaaa.", "Bearer ", "Basic aaaa", "%3A%2F%2Fa%40", "name: token\n", '{"value": ',
    "kind: Secret data:{", "password:\n", "password: |\n  a\n", '"kty":', "curl -u ", "mysql -p", "login ", "storage_options={",
    "tokens=['", "setenv token a ", "the token is ", "token a\n", "-----END PRIVATE KEY-----\n", "A" * 20 + "\n", "auth=(",
    "config set a ",
    "'token', '", "docker login -p", "Private-Lines: 999\n", 'token="a" -> ', "\\u0074oken=", "a | ",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_time_grows_with_the_length_alone(piece: str) -> None:
    """Eight times the text takes at most thirty times as long; quadratic would be sixty-four."""
    sizes = (8_000, 64_000)
    best = [min(_seconds(piece * (size // len(piece))) for _ in range(2)) for size in sizes]
    assert best[1] < 30 * best[0] + 0.05, best


def _seconds(text: str) -> float:
    started = time.process_time()
    redact_text(text)
    return time.process_time() - started
