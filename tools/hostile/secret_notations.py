"""Secrets x notations x carriers: texts that hold one secret each, as programs write them.

A notation takes a name and a secret; a carrier takes the text of a notation and puts it where logs hold texts. Names say what is
secret in most notations; marked tokens, keys and URLs need none.
"""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pprint import pformat
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]

NAMES = (
    "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "db-password", "client_secret", "accessToken", "apiKey", "PGPASSWORD",
    "private_key", "session_token", "AIRFLOW__CORE__FERNET_KEY", "GITHUB_PAT", "registry_auth", "MYSQL_PWD", "signing-key",
)  # fmt: skip
Notation = Callable[[str, str], str]
Carrier = Callable[[str], str]


def _secret_object(secret: str, style: str) -> str:
    value = base64.b64encode(secret.encode()).decode()
    record = {"apiVersion": "v1", "data": {"db": value}, "kind": "Secret"}
    return json.dumps(record) if style == "json" else yaml.safe_dump(record, width=10**6)


def _escaped(name: str) -> str:
    return "".join(f"\\u{ord(c):04x}" if c.isalpha() else c for c in name)


NOTATIONS: dict[str, Notation] = {
    "env": lambda n, s: f"{n}={s}",
    "env list of JSON": lambda n, s: json.dumps(["PATH=/usr/bin", f"{n}={s}", "HOME=/root"]),
    "export": lambda n, s: f"export {n}='{s}'",
    "fish": lambda n, s: f"set -gx {n} {s}",
    "csh": lambda n, s: f"setenv {n} {s}",
    "setx": lambda n, s: f"setx {n} {s}",
    "powershell": lambda n, s: f'$env:{n} = "{s}"',
    "dockerfile": lambda n, s: f"ENV {n} {s}",
    "systemd": lambda n, s: f'Environment="A=b" "{n}={s}"',
    "aws configure": lambda n, s: f"aws configure set {n} {s} --profile p",
    "yaml": lambda n, s: f"{n}: {s}",
    "yaml block": lambda n, s: f"{n}: |\n  {s}\n",
    "yaml folded": lambda n, s: f"{n}: >-\n    {s[: len(s) // 2]}\n    {s[len(s) // 2 :]}",
    "yaml list": lambda n, s: f"{n}:\n- {s}\nnext: 1",
    "yaml mapping": lambda n, s: f"{n}:\n  value: {s}\nnext: 1",
    "kubernetes yaml": lambda n, s: f"- name: {n}\n  value: {s}",
    "kubernetes yaml, value first": lambda n, s: f"- value: {s}\n  name: {n}",
    "kubernetes json": lambda n, s: json.dumps([{"name": "A", "value": "b"}, {"name": n, "value": s}]),
    "kubernetes json, value first": lambda n, s: json.dumps({"value": s, "name": n}),
    "kubernetes indented json": lambda n, s: json.dumps({"env": [{"name": n, "value": s}]}, indent=2),
    "kubernetes repr": lambda n, s: repr({"name": n, "value": s, "value_from": None}),
    "kubernetes go": lambda n, s: f"Env:[{{Name:A Value:b}} {{Name:{n} Value:{s} ValueFrom:nil}}]",
    "kubernetes go quoted": lambda n, s: f'v1.EnvVar{{Name:"{n}", Value:"{s}", ValueFrom:(*v1.EnvVarSource)(nil)}}',
    "kubernetes secret yaml": lambda _, s: _secret_object(s, "yaml"),
    "kubernetes secret json": lambda _, s: _secret_object(s, "json"),
    "json": lambda n, s: json.dumps({"a": 1, n: s, "b": [2]}),
    "indented json": lambda n, s: json.dumps({"a": 1, n: s, "b": [2]}, indent=4),
    "json list": lambda n, s: json.dumps({n: [s, "x"]}, indent=1),
    "json escapes": lambda n, s: f'{{"{_escaped(n)}": "{s}"}}',
    "json in json": lambda n, s: json.dumps({"body": json.dumps({n: s})}),
    "repr": lambda n, s: repr({"a": None, n: s}),
    "pprint": lambda n, s: pformat({"a": "x" * 60, n: s, "z": list(range(30))}, width=60),
    "dataclass": lambda n, s: f"Config(host='h', {n.replace('-', '_')}='{s}', port=1)",
    "call": lambda n, s: f'connect("h", {n.replace("-", "_")}="{s}")',
    "setdefault": lambda n, s: f'os.environ.setdefault("{n}", "{s}")',
    "pair": lambda n, s: f"[(b'{n}', b'{s}'), (b'a', b'b')]",
    "basic auth": lambda _, s: f"requests.get(url, auth=('user', '{s}'))",
    "HTTPBasicAuth": lambda _, s: f"HTTPBasicAuth('user', '{s}')",
    "toml": lambda n, s: f'"{n}" = "{s}"',
    "toml lines": lambda n, s: f'{n} = """\n{s}\n"""',
    "ini": lambda n, s: f"[a]\n{n} = {s}",
    "terraform": lambda n, s: f'  ~ {n} = "old-{s[:6]}" -> "{s}"',
    "option": lambda n, s: f"run --{n.lower()} {s} --steps 3",
    "option with =": lambda n, s: f"run --{n.lower()}={s} --steps 3",
    "argv": lambda n, s: json.dumps(["run", f"--{n.lower()}", s, "--steps", "3"]),
    "xml": lambda n, s: f"<{n}>{s}</{n}>",
    "header": lambda _, s: f"> Authorization: Bearer {s}",
    "header token": lambda _, s: f"curl -H 'Authorization: token {s}' https://h/x",
    "cookie": lambda _, s: f"Cookie: sid={s}; a=b",
    "basic": lambda _, s: "Authorization: Basic " + base64.b64encode(f"user:{s}".encode()).decode(),
    "curl -u": lambda _, s: f"curl -s -u user:{s} https://h/x",
    "curl --user": lambda _, s: f"curl --user user:{s} https://h/x",
    "curl in argv": lambda _, s: json.dumps(["curl", "-u", f"user:{s}", "https://h/x"]),
    "sshpass": lambda _, s: f"sshpass -p {s} ssh host",
    "mysql": lambda _, s: f"mysql -uroot -p{s} db",
    "docker login": lambda _, s: f"docker login -u me -p {s} registry",
    "redis-cli": lambda _, s: f"redis-cli -h host -a {s} ping",
    "netrc": lambda _, s: f"machine api.wandb.ai\n  login user\n  password {s}",
    "netrc line": lambda _, s: f"machine api.wandb.ai login user password {s}",
    "fluent-bit": lambda _, s: f"    HTTP_User  me\n    HTTP_Passwd  {s}",
    "user info": lambda _, s: f"https://me:{s}@host.example/path",
    "sqlalchemy": lambda _, s: f"create_engine('postgresql+psycopg2://me:{s}@db:5432/x')",
    "sentry": lambda _, s: f"dsn https://{s}@o1.ingest.sentry.io/42",
    "query": lambda _, s: f"GET https://h/x?X-Amz-Signature={s}&X-Amz-Date=1",
    "encoded URL": lambda _, s: "next=" + quote(f"https://me:{s}@h/x", safe=""),
    "encoded twice": lambda _, s: "next=" + quote(quote(f"https://me:{s}@h/x?a=b", safe=""), safe=""),
    "encoded query": lambda _, s: "next=" + quote(f"https://h/x?sig={s}&a=b", safe="") + "&b=c",
    "azure": lambda _, s: f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={s};EndpointSuffix=core.windows.net",
    "odbc": lambda _, s: f"Driver={{ODBC}};Server=h;Uid=u;Pwd={s};",
    "airflow": lambda _, s: f"airflow connections add x --conn-password {s} --conn-host h",
    "slack": lambda _, s: f"POST https://hooks.slack.com/services/T00000000/B00000000/{s}",
    "prose": lambda _, s: f"the password is 7{s}",
    "storage_options": lambda _, s: f"storage_options={{'key': '{s}', 'client_kwargs': {{}}}}",
    "cut off": lambda n, s: f'{{"a": 1, "{n}": "{s}',
    "hub token": lambda _, s: f"cannot load with hf_{s} here",
    "private key": lambda _, s: f"-----BEGIN RSA PRIVATE KEY-----\n{s * 2}\n{s}\n-----END RSA PRIVATE KEY-----",
    "private key in JSON": lambda _, s: json.dumps({"k": f"-----BEGIN PRIVATE KEY-----\n{s * 2}\n-----END PRIVATE KEY-----\n"}),
    "private key cut off": lambda _, s: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{s * 2}\n{s * 2}\n",
    "putty": lambda _, s: f"PuTTY-User-Key-File-3: x\nPrivate-Lines: 2\n{s}\n{s}\nPrivate-MAC: 0",
}  # fmt: skip

CARRIERS: dict[str, Carrier] = {
    "plain": lambda t: t,
    "torchrun": lambda t: "\n".join(f"[default0]:{line}" for line in t.split("\n")),
    "compose": lambda t: "\n".join(f"trainer-1  | {line}" for line in t.split("\n")),
    "log line": lambda t: f"2026-11-22 10:00:00,123 INFO [rank 3 dp_shard1] mine.module: {t}",
    "indented": lambda t: "\n".join(f"    {line}" for line in t.split("\n")),
    "crlf": lambda t: t.replace("\n", "\r\n"),
    "json log": lambda t: json.dumps({"level": "info", "msg": t, "rank": 3}),
    "repr": lambda t: f"ValueError: {t!r}",
}
# Notations that need lines of their own: none in a log line with a time before it, or in quotes.
_LINES_ONLY = (
    "yaml",
    "kubernetes yaml",
    "kubernetes secret yaml",
    "netrc",
    "fluent-bit",
    "putty",
    "ini",
    "toml lines",
    "fish",
    "csh",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A text with a secret between two lines that must stay."""

    name: str
    secret: str
    text: str


def cases(rng: random.Random) -> Iterator[Case]:
    """Every notation in every carrier that keeps its form, with a random name and secret."""
    for notation, write in NOTATIONS.items():
        for carrier, carry in CARRIERS.items():
            if carrier in ("log line", "json log", "repr") and notation.startswith(_LINES_ONLY):
                continue
            secret = _secret(rng)
            text = carry(write(rng.choice(NAMES), secret))
            yield Case(name=f"{notation} / {carrier}", secret=secret, text=f"before: rank 3\n{text}\nafter: step 7\n")


def _secret(rng: random.Random) -> str:
    alphabet = rng.choice([string.ascii_letters + string.digits, string.hexdigits.lower()[:16], string.ascii_letters])
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(24, 48)))


def leaked(case: Case, shown: str) -> list[str]:
    """Parts of four characters of the secret, in clear or as base64, that are shown and are not in what is around it."""
    encoded = base64.b64encode(case.secret.encode()).decode()
    parts = {text[at : at + 4] for text in (case.secret, encoded) for at in range(len(text) - 3)}
    around = case.text.replace(case.secret, "").replace(encoded, "")
    return sorted(part for part in parts if part in shown and part not in around)
