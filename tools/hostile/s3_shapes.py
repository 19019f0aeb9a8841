"""Answers that no S3 server should give: each a change of the honest one, or another one in its place.

A shape without effect stands for a proxy that answers by itself: the server never sees the request.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from tools.hostile.memory_s3 import DECLARATION, Answer, Request, error, xml

Make = Callable[[Request, Answer], Answer]
HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to the network.</body></html>"
XHTML = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>Welcome</p></body></html>'
LISTS = frozenset({"ListObjectsV2"})
READS = frozenset({"GetObject"})
STATS = frozenset({"GetObject", "HeadObject"})
WRITES = frozenset({"PutObject", "UploadPart"})
DOCUMENTS = frozenset({"ListObjectsV2", "DeleteObjects", "CreateMultipartUpload", "CompleteMultipartUpload"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of wrong answer to some operations (all, if empty). `is_slow`: it lasts until the client gives up."""

    name: str
    make: Make
    operations: frozenset[str] = field(default_factory=frozenset)
    has_effect: bool = True
    is_slow: bool = False

    def fits(self, request: Request) -> bool:
        """Whether there is such an answer to this request."""
        return self.fits_any([request.operation])

    def fits_any(self, operations: Iterable[str]) -> bool:
        """Whether there is such an answer to one of these operations."""
        return not self.operations or not self.operations.isdisjoint(operations)


def _sent(how: str) -> Make:
    return lambda _, answer: replace(answer, sent=how)


def _status(status: int) -> Make:
    return lambda _, answer: replace(answer, status=status)


def _headers(**changed: str) -> Make:
    named = {name.replace("_", "-"): value for name, value in changed.items()}
    return lambda _, answer: replace(answer, headers={**answer.headers, **named})


def _without(*names: str) -> Make:
    return lambda _, answer: replace(
        answer, headers={name: value for name, value in answer.headers.items() if name not in names}
    )


def _page(status: int, body: bytes = HTML, **headers: str) -> Make:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _request, _answer: Answer(status, {"Content-Type": "text/html", **named}, body)


def _error(status: int, code: str) -> Make:
    return lambda _request, _answer: error(status, code)


def _body(change: Callable[[bytes], bytes]) -> Make:
    return lambda _, answer: replace(answer, body=change(answer.body))


def _text(pattern: str, replacement: str) -> Make:
    return _body(lambda body: re.sub(pattern.encode(), replacement.encode(), body, count=1))


def _whole_object(request: Request, answer: Answer) -> Answer:
    """The status 200 and a longer body for a range, as from a server that ignores ranges."""
    return Answer(200, _without("Content-Range")(request, answer).headers, answer.body + b"the rest of the object")


def _other_range(request: Request, answer: Answer) -> Answer:
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
    if found is None:
        return answer
    first, last = int(found[1]) + 7, int(found[2]) + 7
    return _headers(Content_Range=f"bytes {first}-{last}/{int(found[3]) + 7}")(request, answer)


def _compressed(_: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"}, body=gzip.compress(answer.body))


_numbers = count()


def _other_etag(request: Request, answer: Answer) -> Answer:
    """Another ETag with every answer, as if the object were replaced all the time."""
    return _headers(ETag=f'"{next(_numbers):032x}"')(request, answer)


def _list_page(rows: str, *, prefix: str, is_cut: bool, token: str = "") -> Answer:
    fields = f"<Prefix>{prefix}</Prefix><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
    cut = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return xml("ListBucketResult", fields + cut + rows)


def _rows(prefix: str, numbers: range) -> str:
    when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>1</Size>"
    return "".join(f"<Contents><Key>{prefix}k{number}</Key>{when}</Contents>" for number in numbers)


def _endless_list(keys: Callable[[int], range], token: Callable[[int], str]) -> Make:
    """Pages without end, with these keys and that token on page n."""

    def make(request: Request, _: Answer) -> Answer:
        number, prefix = next(_numbers), request.query.get("prefix", "")
        return _list_page(_rows(prefix, keys(number)), prefix=prefix, is_cut=True, token=token(number))

    return make


def _raw(body: bytes) -> Make:
    return lambda _request, _answer: Answer(body=body, sent="raw")


_ANY = [
    Shape(name="cut in its middle", make=_sent("cut")),
    Shape(name="closed instead of a length", make=_sent("closed")),
    Shape(name="chunked, without an end", make=_sent("chunked, cut")),
    Shape(name="chunked, longer", make=_sent("chunked, longer")),
    Shape(name="more bytes than announced", make=_sent("followed")),
    Shape(name="sent twice", make=_sent("twice")),
    Shape(name="one byte at a time, longer", make=_sent("slow body"), is_slow=True),
    Shape(name="one byte at a time", make=_sent("slow body, right length"), is_slow=True),
    Shape(name="headers one byte at a time", make=_sent("slow head"), is_slow=True),
    Shape(name="a body of 10 GiB", make=_sent("endless body")),
    Shape(name="chunks without end", make=_sent("endless chunks")),
    Shape(name="headers without end", make=_sent("endless head")),
    Shape(name="a header line without end", make=_sent("endless line")),
    Shape(name="100 Continue without end", make=_sent("endless continue"), has_effect=False),
    Shape(name="no answer", make=_sent("never"), is_slow=True, has_effect=False),
    Shape(name="no answer, done", make=_sent("never"), is_slow=True),
    Shape(name="a reset", make=_sent("reset"), has_effect=False),
    Shape(name="a reset, done", make=_sent("reset")),
    Shape(name="nothing", make=_sent("empty"), has_effect=False),
    Shape(name="bytes that are not HTTP", make=_raw(b"\x16\x03\x01\x00\xff SSH-2.0-OpenSSH\r\n" * 9), has_effect=False),
    Shape(name="HTTP/0.9", make=_raw(HTML), has_effect=False),
    Shape(name="a status that is no number", make=_raw(b"HTTP/1.1 OK fine\r\n\r\n"), has_effect=False),
    Shape(name="a length that is no number", make=_headers(Content_Length="abc")),
    Shape(name="a negative length", make=_headers(Content_Length="-5")),
    Shape(name="a length of 2**63", make=_headers(Content_Length=str(2**63)), is_slow=True),
    Shape(name="two lengths", make=_headers(Content_Length="3\r\nContent-Length: 5"), is_slow=True),
    Shape(name="a length one too short", make=lambda r, a: _headers(Content_Length=str(max(len(a.body) - 1, 0)))(r, a)),
    Shape(name="a length one too long", make=lambda r, a: _headers(Content_Length=str(len(a.body) + 1))(r, a), is_slow=True),
    Shape(name="compressed", make=_compressed),
    Shape(name="compressed, as it says", make=_headers(Content_Encoding="gzip")),
    Shape(name="chunked", make=_sent("chunked")),
    Shape(name="a web page, 200", make=_page(200), has_effect=False),
    Shape(name="an XHTML page, 200", make=_page(200, XHTML, Content_Type="application/xml"), has_effect=False),
    Shape(name="a web page, 200, with an ETag", make=_page(200, ETag='"e"'), has_effect=False),
    Shape(name="a web page, 404", make=_page(404), has_effect=False),
    Shape(name="a web page, 403", make=_page(403), has_effect=False),
    Shape(name="a web page, 503", make=_page(503), has_effect=False),
    Shape(name="a redirect in a circle, 302", make=_page(302, Location="/"), has_effect=False),
    Shape(name="a redirect in a circle, 307", make=_page(307, b"", Location="/", Content_Type="x"), has_effect=False),
    Shape(name="a redirect to another region", make=_error(301, "PermanentRedirect"), has_effect=False),
    Shape(name="an empty 404", make=_page(404, b"", Content_Type="x"), has_effect=False, operations=LISTS | {"DeleteObjects"}),
    Shape(name="an empty 200", make=lambda _r, _a: Answer(200), has_effect=False, operations=DOCUMENTS | STATS | WRITES),
    Shape(name="status 204", make=_status(204), operations=DOCUMENTS | STATS | WRITES),
    Shape(name="status 202", make=_status(202)),
    Shape(name="status 304", make=lambda _r, _a: Answer(304), has_effect=False),
    Shape(name="200 with an <Error>", make=_error(200, "InternalError"), has_effect=False),
    Shape(name="503 SlowDown", make=_error(503, "SlowDown"), has_effect=False),
    Shape(name="500 InternalError, done", make=_error(500, "InternalError")),
    Shape(name="403 AccessDenied", make=_error(403, "AccessDenied"), has_effect=False),
]  # fmt: skip


def _refusal(status: int, code: str, message: str, more: str = "", **headers: str) -> Shape:
    """An error as S3 documents it; it stands in the body, which an answer to HEAD has not."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def make(_request: Request, _answer: Answer) -> Answer:
        body = f"{DECLARATION}<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>"
        return Answer(status, {"Content-Type": "application/xml", **named}, body.encode())

    return Shape(name=f"{status} {code}", make=make, has_effect=False)


_EU = "<Endpoint>bucket.s3.eu-west-1.amazonaws.com</Endpoint>"
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_REFUSALS = [
    _refusal(301, "PermanentRedirect", "Use the specified endpoint.", _EU, x_amz_bucket_region="eu-west-1"),
    _refusal(307, "TemporaryRedirect", "Please re-send it to the specified endpoint.", _EU, Location="http://127.0.0.1:1/"),
    _refusal(400, "AuthorizationHeaderMalformed", "the region is wrong; expecting eu-west-1", "<Region>eu-west-1</Region>"),
    _refusal(400, "IllegalLocationConstraintException", "The eu-west-1 location constraint is incompatible for this endpoint."),
    _refusal(400, "ExpiredToken", "The provided token has expired."),
    _refusal(400, "InvalidToken", "The provided token is malformed or otherwise invalid."),
    _refusal(403, "InvalidAccessKeyId", "The access key ID that you provided does not exist in our records."),
    _refusal(403, "SignatureDoesNotMatch", "The signature that you provided does not match the one that we calculated."),
    _refusal(403, "RequestTimeTooSkewed", "The difference is too large.", Date="Thu, 01 Jan 2026 00:00:00 GMT"),
    _refusal(403, "AllAccessDisabled", "All access to this object has been disabled."),
    _refusal(403, "InvalidObjectState", "The operation is not valid for the object's storage class"),
    _refusal(403, "QuotaExceeded", "The quota is used up"),
    _refusal(507, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold."),
    _refusal(503, "SlowDown", "Please reduce your request rate.", Retry_After="86400"),
    _refusal(400, "RequestTimeout", "Your socket connection to the server was not read from or written to in time."),
    _refusal(409, "ConditionalRequestConflict", "A conflicting operation occurred during the request."),
    _refusal(412, "PreconditionFailed", "At least one of the preconditions did not hold."),
    _refusal(501, "NotImplemented", "A header that you provided implies functionality that is not implemented."),
    _refusal(404, "NoSuchBucket", "The specified bucket does not exist."),
]  # fmt: skip

_OBJECTS = [
    Shape(name="200 for a range", make=_whole_object, operations=READS),
    Shape(name="another range", make=_other_range, operations=READS),
    Shape(name="no range", make=_without("Content-Range"), operations=READS),
    Shape(name="a range that is no number", make=_headers(Content_Range="bytes x-y/z"), operations=READS),
    Shape(name="a shorter body and length", make=_body(lambda body: body[:-1]), operations=READS),
    Shape(name="a longer body and length", make=_body(lambda body: body + b"!"), operations=READS),
    Shape(name="another ETag each time", make=_other_etag, operations=READS),
    Shape(name="another ETag in a stat", make=_other_etag, operations=frozenset({"HeadObject"})),
    Shape(name="412, done", make=_error(412, "PreconditionFailed"), operations=frozenset({"PutObject"})),
    Shape(name="409, done", make=_error(409, "ConditionalRequestConflict"), operations=frozenset({"PutObject"})),
    Shape(name="no ETag", make=_without("ETag"), operations=STATS | WRITES),
    Shape(name="an empty ETag", make=_headers(ETag='""'), operations=STATS | WRITES),
    Shape(name="no time", make=_without("Last-Modified"), operations=frozenset({"HeadObject"})),
    Shape(name="a time that is none", make=_headers(Last_Modified="yesterday"), operations=STATS),
    Shape(name="a stat without a length", make=_headers(Content_Length=""), operations=frozenset({"HeadObject"})),
    Shape(name="a stat of a shorter object", make=_headers(Content_Length="5"), operations=frozenset({"HeadObject"})),
    Shape(name="a stat of 10 GiB", make=_headers(Content_Length=str(10 << 30)), operations=frozenset({"HeadObject"})),
    Shape(name="another checksum", make=_headers(x_amz_checksum_crc32="AAAAAA=="), operations=WRITES),
]  # fmt: skip


def _documents(name: str, make: Make, *, has_effect: bool = True) -> Shape:
    return Shape(name=name, make=make, operations=DOCUMENTS, has_effect=has_effect)


def _lists(name: str, make: Make, *, is_slow: bool = False) -> Shape:
    return Shape(name=name, make=make, operations=LISTS, is_slow=is_slow)


def _entities(_request: Request, _answer: Answer) -> Answer:
    """A small document that is large when its entities are replaced."""
    entity = f'<!DOCTYPE x [<!ENTITY a "{"a" * 9999}">]>'
    return Answer(body=f"{DECLARATION}{entity}<ListBucketResult>{'&a;' * 999}</ListBucketResult>".encode())


def _outside(_request: Request, _answer: Answer) -> Answer:
    """A document with a file of the client's."""
    entity = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]>'
    return Answer(body=f"{DECLARATION}{entity}<ListBucketResult><Prefix>&a;</Prefix></ListBucketResult>".encode())


def _growing(_request: Request, _answer: Answer) -> Answer:
    """Entities made of entities: 10**9 letters."""
    names = "abcdefghi"
    more = "".join(f'<!ENTITY {name} "{f"&{last};" * 10}">' for last, name in pairwise(names))
    entity = f'<!DOCTYPE x [<!ENTITY a "{"a" * 10}">{more}]>'
    return Answer(body=f"{DECLARATION}{entity}<ListBucketResult><Prefix>&i;</Prefix></ListBucketResult>".encode())


def _hollow(body: bytes) -> bytes:
    return re.sub(rb"(<\w+Result[^>]*>).*(</)", rb"\1\2", body, flags=re.DOTALL)


_DOCUMENTS = [
    _documents("a document cut and measured", _body(lambda body: body[: len(body) // 2])),
    _documents("a document without content", _body(_hollow)),
    _documents("another document", lambda _r, _a: xml("CopyObjectResult", "<ETag>e</ETag>"), has_effect=False),
    _documents("entities that grow", _entities, has_effect=False),
    _documents("entities of entities", _growing, has_effect=False),
    _documents("an entity that is a file", _outside, has_effect=False),
    _documents("spaces before the document", _body(lambda body: b" \n" * 99 + body)),
    _documents("UTF-16", _body(lambda body: body.decode().replace("UTF-8", "UTF-16").encode("utf-16"))),
    _documents("a NUL", _body(lambda body: body.replace(b"><", b">\0<", 1))),
    _lists("a row twice", _text("(<Contents>.*?</Contents>)", r"\1\1")),
    _lists("a listing of another folder", _text("<Prefix>[^<]*</Prefix>", "<Prefix>elsewhere/</Prefix>")),
    _lists("keys outside the folder", _text("<Contents><Key>[^<]*", "<Contents><Key>elsewhere/x")),
    _lists("one row less than counted", _text("<Contents>.*?</Contents>", "")),
    _lists("complete or not, unsaid", _text("<IsTruncated>false</IsTruncated>", "")),
    _lists("not complete, without a token", _text("<IsTruncated>false", "<IsTruncated>true")),
    _lists("a size that is no number", _text("<Size>[0-9]+", "<Size>many")),
    _lists("a negative size", _text("<Size>[0-9]+", "<Size>-7")),
    _lists("a row without a key", _text("<Contents><Key>[^<]*</Key>", "<Contents>")),
    _lists("pages with one token", _endless_list(lambda n: range(n, n + 1), lambda _: "t")),
    _lists("pages with the same keys", _endless_list(lambda _: range(3), lambda n: f"t{n}")),
    _lists("pages without keys", _endless_list(lambda _: range(0), lambda n: f"t{n}"), is_slow=True),
    _lists("pages without end", _endless_list(lambda n: range(9 * n, 9 * n + 9), lambda n: f"t{n}"), is_slow=True),
    Shape(
        name="keys that were not deleted",
        make=_text("<Deleted>.*?</Deleted>", ""),
        operations=frozenset({"DeleteObjects"}),
    ),
]

SHAPES = {shape.name: shape for shape in [*_ANY, *_REFUSALS, *_OBJECTS, *_DOCUMENTS]}
REFUSALS = {shape.name: shape for shape in _REFUSALS}
