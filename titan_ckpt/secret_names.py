"""Which names have a secret as their value: one pattern, used in texts and for the keys of JSON values."""

from __future__ import annotations

import re

_SPECIAL = (
    "bos", "eos", "pad", "unk", "mask", "cls", "sep", "image", "video", "audio", "special", "vocab", "per", "next", "num",
)  # fmt: skip
_NOT_SPECIAL = "".join(f"(?<!{word}_)" for word in _SPECIAL)
_ALONE = r"(?<![A-Za-z0-9])"
_KINDS_OF_KEYS = (
    "access|account|admin|api|app|application|auth|bot|client|consumer|csrf|deploy|encryption|fernet|functions|hmac|host|ingestion"
    "|instrumentation|jwt|license|master|master[_-]?user|private|root|secret|server|service|session|shared|signing|ssh|ssl|storage"
    "|sse[_-]?customer|encryption[_-]customer|subscription|tls|webhook|wg|dd|datadog|sas|admin[_-]?api"
)
WORDS = (
    r"pass(?:word|wd|phrase|code)s?|"
    + _ALONE
    + r"(?:pass|pwd|pw|psk|pat|sig|sas|auth|creds?|jwt|dsn|mnemonic)|secrets?|secret[_-]?id|"
    rf"(?:{_KINDS_OF_KEYS})[_-]?keys?(?:[_-]?id)?(?:[_-]?data)?|secretkey|requirepass|masterauth|bindpw|sshpass|"
    + _NOT_SPECIAL
    + r"token|token[_-]?(?:value|secret)|credentials?|signature|authorization|(?:set-)?cookie|"
    r"connection[_-]?string|webhook(?:[_-]?url)?|x-amz-(?:security-token|credential|signature)|x-goog-(?:credential|signature)|"
    r"\.?docker(?:configjson|cfg)|kubeconfig"
)
ENDING = r"(?:[_-]?(?:\d{1,3}|b64|base64|raw|value|plain))?"
NAME = rf"[\w.\-/]{{0,60}}?(?:{WORDS}){ENDING}(?![\w-])"
# How a name ends, on text in lower case: cheap to look for, and no name is missed.
ENDS = (
    r"(?:pass(?:word|wd|phrase|code)?s?|pwd|pw|psk|pat|sig(?:nature)?|sas|auth(?:orization)?|cred(?:ential)?s?|jwt|dsn|mnemonic"
    r"|secrets?|keys?|token|cookie|string|webhook|docker(?:configjson|cfg)|kubeconfig|requirepass|masterauth|bindpw|sshpass)"
    r"(?:[_-]?(?:id|data|value|secret|url|b64|base64|raw|plain|\d{1,3})){0,3}"
)

INVISIBLE = (
    r"(?:\x1b\[[0-9;]{0,12}m|[\u200b-\u200d\ufeff]){0,4}"  # colours and zero-width characters around a name and a value
)

_AT_END = re.compile(rf"(?:{WORDS}){ENDING}\Z", re.IGNORECASE)


def is_secret_name(name: object) -> bool:
    """Whether a value with this name is a secret.

    >>> is_secret_name("AWS_SECRET_ACCESS_KEY"), is_secret_name("Authorization"), is_secret_name("eos_token")
    (True, True, False)
    """
    text = name if isinstance(name, str) else ""
    return _AT_END.search(text) is not None
