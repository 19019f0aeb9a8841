"""Secrets that show by their own form: private keys, tokens with a service's mark, web hooks, header schemes.

Sources of the marks: the services' own pages, the lists of GitHub secret scanning, gitleaks and trufflehog. Private keys: PEM
(RFC 7468, RFC 1421), OpenSSH, SSH2 (RFC 4716), PuTTY's PPK, age, JWK (RFC 7517).
"""

from __future__ import annotations

import base64
import binascii
import re

from titan_ckpt.secret_spans import PREFIX, Span, end_of_line, start_of_line

_W, _D = r"[\w-]", r"[\w.-]"
# Marks, and what follows them.
_MARKS: tuple[tuple[str, str], ...] = (
    ("AKIA ASIA ABIA ACCA AGPA AIDA AIPA ANPA ANVA AROA A3T", "[A-Z0-9]{12,124}"),  # AWS IAM identifiers
    ("FwoG FQoG IQoJ", "[A-Za-z0-9+/=]{40,}"),  # AWS session tokens
    ("ABSK", "[A-Za-z0-9+/]{60,}={0,2}"),  # AWS Bedrock
    ("LTAI AKID", "[A-Za-z0-9]{12,60}"),  # Alibaba, Tencent
    ("GOOG", "[A-Z0-9]{16,}"),  # Google: HMAC
    ("AIza", f"{_W}{{30,}}"),  # Google: API key
    ("ya29. 1//0 GOCSPX-", f"{_W}{{16,}}"),  # Google: OAuth
    ("hf_ api_org_", "[A-Za-z0-9]{16,}"),  # Hugging Face
    ("ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"\w{16,}"),  # GitHub
    ("glpat- glrt- glrtr- gldt- glptt- glft- glimt- glagent- gloas- glsoat- glcbt- glffct- glwt- GR1348941",
     f"{_D}{{16,}}"),  # GitLab
    ("ATATT3 ATCTT3 ATBB", "[A-Za-z0-9_=-]{20,}"),  # Atlassian
    ("sk-", f"{_W}{{16,}}"),  # OpenAI, Anthropic, DeepSeek and others
    ("sess-", "[A-Za-z0-9]{24,}"),
    ("gsk_ xai- r8_ pplx- nvapi- fw_ tgp_v1_ csk- pk-lf- jina_ lsv2_pt_ lsv2_sk_ tvly- fc- e2b_ rpa_ vastai_ pcsk_ llx-",
     f"{_W}{{20,}}"),  # Groq, xAI, Replicate, Perplexity, NVIDIA, Fireworks, Together, Cerebras, Langfuse, Jina, LangSmith, ...
    ("wandb_v1_", f"{_W}{{8,}}"),  # W&B
    ("local-", "[0-9a-f]{36,}"),
    ("xoxa- xoxb- xoxc- xoxd- xoxe- xoxe. xoxo- xoxp- xoxr- xoxs- xapp- xwfp-", f"{_D}{{8,}}"),  # Slack
    ("sk_live_ sk_test_ rk_live_ rk_test_ pk_live_ pk_test_ sk_prod_ rk_prod_", r"\w{10,}"),  # Stripe
    ("whsec_", "[A-Za-z0-9+/=]{16,}"),
    ("sk_", "(?=[A-Za-z]*[0-9])[A-Za-z0-9]{24,}"),
    ("npm_", "[A-Za-z0-9]{16,}"),
    ("pypi-", f"{_W}{{16,}}"),
    ("dop_v1_ doo_v1_ dor_v1_", "[a-f0-9]{16,}"),  # DigitalOcean
    ("SG.", r"[\w-]{8,}\.[\w-]{8,}"),  # SendGrid
    ("SK", r"[0-9a-f]{32}\b"),  # Twilio
    ("dckr_pat_ dckr_oat_", f"{_W}{{16,}}"),  # Docker
    ("hvs. hvb. hvr.", f"{_W}{{20,}}"),  # Vault
    ("glsa_ glc_", r"[\w+/=]{20,}"),  # Grafana
    ("shpat_ shpca_ shppa_ shpss_", "[a-fA-F0-9]{16,}"),  # Shopify
    ("dapi dkea dose dsapi", r"[a-f0-9]{30,}(?:-\d)?"),  # Databricks
    ("lin_api_ lin_oauth_", r"\w{16,}"),  # Linear
    ("NRAK- NRII- NRJS- NRAA- NRRA-", f"{_W}{{16,}}"),  # New Relic
    ("sntrys_ sntryu_", r"[\w+/=.-]{20,}"),  # Sentry
    ("AGE-SECRET-KEY-1", "[A-Z0-9]{20,}"),  # age
    ("AGE-PLUGIN-", "[A-Z0-9-]{20,}"),
    ("key- pub-", r"[0-9a-f]{32}\b"),  # Mailgun
    ("EAAC EAAG EAAAE", r"[\w+/=-]{40,}"),  # Meta, Square
    ("sq0atp- sq0csp- sq0idp-", f"{_W}{{20,}}"),
    ("PMAK- rubygems_ figd_ figo_ ntn_ phc_ phx_ pscale_tkn_ pscale_oauth_ pscale_pw_ tskey-auth- tskey-api- tskey-client- "
     "doppler_ dp.st. dp.pt. dp.ct. dp.sa. dp.scim. dp.audit.", f"{_D}{{16,}}"),  # Postman, RubyGems, Figma, Notion, PostHog, ...
    ("sbp_ sb_secret_ nfp_ oy2 CFPAT- dt0c01. bkua_ pul- ops_eyJ fo1_ secret_", "[A-Za-z0-9.-]{32,}"),  # Supabase, NuGet, ...
    ("A3-", r"[A-Z0-9]{6}-[A-Z0-9-]{17,}"),  # 1Password
    ("eyJ", r"[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*){0,3}"),  # JSON web tokens, RFC 7519; encrypted ones have five parts, RFC 7516
)  # fmt: skip
_BY_MARK = [(mark, re.compile(re.escape(mark) + rest)) for marks, rest in _MARKS for mark in marks.split()]
# Tokens with a mark in the middle: the mark, how many characters before it to look, and the whole.
_INSIDE = (
    (".atlasv1.", 14, re.compile(rf"[A-Za-z0-9]{{14}}\.atlasv1\.{_D}{{20,}}")),  # Terraform
    ("Q~", 4, re.compile(r"[A-Za-z0-9_~.]{3}[78]Q~[\w~.-]{30,}")),  # Azure AD client secrets
    (":AA", 10, re.compile(rf"\d{{8,10}}:AA{_W}{{32,}}")),  # Telegram
)


def is_marked(value: str) -> bool:
    """Whether the whole of `value` is a token with a mark."""
    return marked_spans(value) == [(0, len(value))]


def marked_spans(text: str) -> list[Span]:
    """Spans of tokens with a mark."""
    found: list[Span] = []
    for mark, pattern in _BY_MARK:
        at = text.find(mark)
        while at >= 0:
            match = None if at and (text[at - 1].isalnum() or text[at - 1] == "_") else pattern.match(text, at)
            if match is not None:
                found.append(match.span())
            at = text.find(mark, at + len(mark) if match is None else match.end())
    for mark, before, pattern in _INSIDE:
        at = text.find(mark)
        while at >= 0:
            match = pattern.search(text, max(0, at - before), at + 400)
            found += [] if match is None else [match.span()]
            at = text.find(mark, at + len(mark) if match is None else max(match.end(), at + len(mark)))
    return found


_HOOK = re.compile(
    r"(?:hooks\.slack\.com/[a-z]{1,20}/|discord(?:app)?\.com/api/(?:v\d+/)?webhooks/|(?:outlook\.office(?:365)?|[\w-]{1,63}\.webhook\.office)"
    r"\.com/webhookb?2?/|api\.telegram\.org/(?:file/)?bot|hooks\.zapier\.com/hooks/catch/|maker\.ifttt\.com/trigger/[\w-]{1,60}/(?:with|json/with)/key/"
    r"|open\.(?:feishu|larksuite)\.(?:cn|com)/open-apis/bot/v2/hook/|/hooks/(?=[a-z0-9]{26}\b))([\w/@.:-]+)"
)
_BEARER = re.compile(r"\b(?:[Bb]earer|BEARER)[ \t]+(?=\S*[\d_.-])(\S{6,})")
_BASIC = re.compile(r"\b(?:[Bb]asic|BASIC)[ \t]+([A-Za-z0-9+/_-]{6,}={0,2})")


def token_spans(text: str, low: str) -> list[Span]:
    """Spans of tokens with a mark, of web hooks, and of Bearer and Basic (RFC 6750, RFC 7617); `low`: in lower case."""
    found = marked_spans(text)
    if "hook" in low or "api.telegram" in low or "maker.ifttt" in low:
        found += [match.span(1) for match in _HOOK.finditer(low)]
    if "bearer" in low:
        found += [match.span(1) for match in _BEARER.finditer(text)]
    if "basic" in low:
        found += [match.span(1) for match in _BASIC.finditer(text) if _is_pair(match.group(1))]
    return found


def _is_pair(value: str) -> bool:
    padded = value + "=" * (-len(value) % 4)
    try:
        return b":" in base64.b64decode(padded, altchars=b"-_" if "-" in value or "_" in value else None)
    except (ValueError, binascii.Error):
        return False


# ------------------------------------------------------------------------------------------------------- private keys

_BEGIN = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_END = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PPK = re.compile(r"Private-Lines:[ \t]*(\d{1,4})[ \t\r]*\n")
_JWK = re.compile(r"\\{0,7}\"kty\\{0,7}\"\s{0,8}:")
_JWK_VALUE = re.compile(r"\\{0,7}\"(?:d|p|q|dp|dq|qi|k)\\{0,7}\"\s{0,8}:\s{0,8}\\{0,7}\"([\w-]+)")
_KEY_LINE = re.compile(
    rf"(?:{PREFIX})?[ \t|>\"'+]*(?:[A-Za-z0-9+/=]{{16,}}|(?=[^\n]*[0-9A-Z+/=])[A-Za-z0-9+/]{{2,}}={{0,2}}"
    r"|(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset): [^\n]*|)[\"'\\nr,+ \t\r]*\Z"
)
_MAX_KEY, _MAX_LINES, _MAX_JWK = 1 << 16, 400, 1 << 13


def key_spans(text: str) -> list[Span]:
    """Spans of private keys; of one that is cut off, the lines that look like a part of it."""
    found = _pem(text) if "PRIVATE KEY" in text else []
    for match in _PPK.finditer(text) if "Private-Lines" in text else ():
        end = match.end()
        for _ in range(min(int(match.group(1)), _MAX_LINES) if not found or end > found[-1][1] else 0):
            end = min(end_of_line(text, end) + 1, len(text))
        found.append((match.end(), end))
    last = -1
    for match in _JWK.finditer(text) if '"kty' in text else ():
        begin = max(match.start() - _MAX_JWK, last, 0)
        last = match.end() + _MAX_JWK
        found += [value.span(1) for value in _JWK_VALUE.finditer(text, begin, last)]
    return found


def _pem(text: str) -> list[Span]:
    found: list[Span] = []
    done = 0
    for begin in _BEGIN.finditer(text):
        if begin.start() < done:
            continue
        following = _BEGIN.search(text, begin.end(), begin.end() + _MAX_KEY)
        end = _END.search(text, begin.end(), following.start() if following else begin.end() + _MAX_KEY)
        done = end.start() if end is not None else _end_of_key(text, begin.end())
        found.append((begin.end(), done))
    for end in _END.finditer(text):
        if not found or not any(start <= end.start() <= stop for start, stop in found[-4:]):
            start = _start_of_key(text, end.start())
            found.append((start, end.start()))
    return found


def _end_of_key(text: str, begin: int) -> int:
    """The end of the lines after `begin` that look like a key."""
    at = end_of_line(text, begin)
    for _ in range(_MAX_LINES):
        line = end_of_line(text, at + 1)
        if at >= len(text) or not _KEY_LINE.match(text[at + 1 : line]):
            break
        at = line
    return at


def _start_of_key(text: str, end: int) -> int:
    """The start of the lines before `end` that look like a key, and no headers."""
    at = start_of_line(text, end)
    for _ in range(_MAX_LINES):
        line = start_of_line(text, at - 1) if at else 0
        if at == 0 or not re.fullmatch(
            rf"(?:{PREFIX})?[ \t\"'+]*[A-Za-z0-9+/=]{{16,}}[\"'\\nr,+ \t\r]*", text[line : at - 1]
        ):
            break
        at = line
    return at
