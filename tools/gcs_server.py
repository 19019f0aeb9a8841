"""A server of ours that follows the documented XML API of Google Cloud Storage, for tests: no packaged emulator has it.

Objects in memory: PUT, GET with ranges, HEAD, DELETE, lists, multipart uploads, and the precondition `x-goog-if-generation-match`
(https://cloud.google.com/storage/docs/xml-api/reference-headers). It checks no signatures.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


@dataclass(slots=True)
class _Object:
    data: bytes
    generation: int

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data + str(self.generation).encode()).hexdigest()}"'


@dataclass(slots=True)
class _State:
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0

    def put(self, path: str, data: bytes, wanted: str | None) -> _Object | None:
        """The new object; None if the one that is there has not the generation `wanted` (0: none)."""
        with self.lock:
            found = self.objects.get(path)
            if wanted is not None and int(wanted) != (found.generation if found else 0):
                return None
            self.count += 1
            self.objects[path] = _Object(data, self.count)
            return self.objects[path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: _State

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("size") or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _place(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).strip("/"), query

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def do_PUT(self) -> None:
        path, query = self._place()
        data = self._body()
        if "uploadId" in query:
            parts = self.state.uploads.get(query["uploadId"])
            if parts is None:  # aborted while this part was on its way
                self._error(404, "NoSuchUpload")
                return
            parts[int(query["partNumber"])] = data
            self._answer(200, ETag=f'"{hashlib.md5(data).hexdigest()}"')
            return
        self._made(self.state.put(path, data, self.headers.get("x-goog-if-generation-match")))

    def _made(self, made: _Object | None, body: bytes = b"") -> None:
        if made is None:
            self._error(412, "PreconditionFailed")
            return
        self._answer(200, body, ETag=made.etag, x_goog_generation=str(made.generation))

    def do_POST(self) -> None:
        path, query = self._place()
        self._body()
        if "uploads" in query:
            with self.state.lock:
                self.state.count += 1
                name = f"upload-{self.state.count}"
                self.state.uploads[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
            return
        parts = self.state.uploads.pop(query["uploadId"], None)
        if parts is None:
            self._error(404, "NoSuchUpload")
            return
        made = self.state.put(path, b"".join(parts[number] for number in sorted(parts)), None)
        assert made is not None
        etag = f"<CompleteMultipartUploadResult><ETag>{escape(made.etag)}</ETag></CompleteMultipartUploadResult>"
        self._made(made, etag.encode())

    def do_DELETE(self) -> None:
        path, query = self._place()
        if "uploadId" in query:
            self.state.uploads.pop(query["uploadId"], None)
            self._answer(204)
        elif self.state.objects.pop(path, None) is None:
            self._error(404, "NoSuchKey")
        else:
            self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, query = self._place()
        if "/" not in path:
            self._list(path, query)
            return
        found = self.state.objects.get(path)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        data, headers = found.data, {"ETag": found.etag, "x_goog_generation": str(found.generation)}
        headers["Last_Modified"] = formatdate(usegmt=True)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self._answer(200, data, **headers)
            return
        start, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
        if start >= len(data):
            self._error(416, "InvalidRange")
            return
        headers["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
        self._answer(206, data[start : end + 1], **headers)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or ""
        names = sorted(path.partition("/")[2] for path in list(self.state.objects) if path.startswith(f"{bucket}/"))
        entries, folders = list[str](), set[str]()
        for name in (name for name in names if name.startswith(prefix) and name > after):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif len(entries) == PAGE:
                break
            else:
                entries.append(name)
        is_cut = len(entries) == PAGE
        xml = [f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>"]
        if is_cut:
            xml.append(f"<NextContinuationToken>{escape(entries[-1])}</NextContinuationToken>")
        for name in entries:
            found = self.state.objects.get(f"{bucket}/{name}")
            if found is not None:
                xml.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
                )
        xml += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        self._answer(200, "".join([*xml, "</ListBucketResult>"]).encode(), Content_Type="application/xml")


@contextmanager
def running_gcs() -> Iterator[dict[str, str]]:
    """Serve; yields the key of a service account (option `token`) that leads to this server and needs no OAuth."""
    handler = type("Handler", (_Handler,), {"state": _State()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        key: dict[str, str] = json.loads(
            '{"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": true}'
        )
        yield {**key, "gcs_base_url": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
