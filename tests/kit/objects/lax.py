"""A server of S3 that accepts every put, whatever its condition: what it answers is well-formed,
and what was there is lost. rclone serve s3 and others are such servers. It checks no signature.

It can heed conditions, too, those of Google Cloud Storage's XML API among them, whose clients it
then serves as well. As a program it prints its port and serves until its stdin ends: then it drops
parts, so that a benchmark measures the client.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import threading
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

DATE = "Thu, 26 Nov 2026 02:00:00 GMT"
DATE_IN_XML = "2026-11-26T02:00:00.000Z"


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class Lax:
    """The server, at a port of its own.

    Args:
        heeds: whether it heeds conditions.
        drains: whether what is uploaded in parts is read and dropped.
        kind: of its connections; by default they speak S3.

    Attributes:
        port: of its S3.
        objects: what it holds, by key with the bucket.
        generations: a number of each, another one whenever it is replaced.
    """

    def __init__(
        self, heeds: bool = False, drains: bool = False, kind: type[S3Handler] | None = None
    ) -> None:
        self.heeds, self.drains = heeds, drains
        self.objects: dict[str, bytes] = {}
        self.generations: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self.uploads: dict[str, dict[int, bytes]] = {}
        outer = self

        class Handler(kind or S3Handler):  # type: ignore[misc]  # chosen as it runs
            lax = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Lax:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def keep(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.generations[key] = next(self._numbers)

    def drop(self, key: str) -> None:
        self.objects.pop(key, None)
        self.generations.pop(key, None)

    def listing(self, bucket: str, prefix: str, delimiter: str) -> str:
        begin = f"{bucket}/{prefix}"
        keys = sorted(key for key in self.objects if key.startswith(begin))
        below = [key for key in keys if delimiter and delimiter in key[len(begin) :]]
        cut = len(bucket) + 1
        prefixes = {begin + key[len(begin) :].split(delimiter)[0] + delimiter for key in below}
        contents = "".join(
            f"<Contents><Key>{escape(key[cut:])}</Key><LastModified>{DATE_IN_XML}</LastModified>"
            f"<ETag>{escape(etag(self.objects[key]))}</ETag>"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
            for key in keys
            if key not in below
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each[cut:])}</Prefix></CommonPrefixes>"
            for each in sorted(prefixes)
        )
        whole = f"<IsTruncated>false</IsTruncated>{contents}{common}"
        return f"<ListBucketResult>{whole}</ListBucketResult>"


class S3Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    lax: Lax
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._scratch = bytearray(4 << 20)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def asked(self) -> tuple[str, dict[str, str], bytes]:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        nbytes = int(self.headers.get("Content-Length", 0))
        if self.lax.drains and "partNumber" in query:
            with memoryview(self._scratch) as scratch:
                while nbytes:
                    nbytes -= self.rfile.readinto(scratch[: min(nbytes, len(scratch))])
        return urllib.parse.unquote(url.path).strip("/"), query, self.rfile.read(nbytes)

    def answer(self, status: int, body: bytes | str = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response_only(status)
        self.send_header("Server", "stub")  # an answer without any header is none to some clients
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers and status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):  # the client is gone
                self.wfile.write(data)

    def do_PUT(self) -> None:
        key, query, body = self.asked()
        if "uploadId" in query:
            self.lax.uploads[query["uploadId"]][int(query["partNumber"])] = body
        elif source := self.headers.get("x-amz-copy-source"):
            body = self.lax.objects[urllib.parse.unquote(source).strip("/")]
            self.lax.keep(key, body)
            told = escape(etag(body))
            self.answer(200, f"<CopyObjectResult><ETag>{told}</ETag></CopyObjectResult>")
            return
        elif not self.may(key):
            self.answer(412, "<Error><Code>PreconditionFailed</Code></Error>")
            return
        else:
            self.lax.keep(key, body)
        self.answer(200, ETag=etag(body), **self._generation(key))

    def _generation(self, key: str) -> dict[str, str]:
        return {"x_goog_generation": str(self.lax.generations.get(key, 0))}

    def may(self, key: str) -> bool:
        """Whether the conditions of a request hold, or are not heeded."""
        told, content = self.headers, self.lax.objects.get(key)
        generation = told.get("x-goog-if-generation-match")
        return not self.lax.heeds or not (
            (told.get("If-None-Match") == "*" and content is not None)
            or (told.get("If-Match") and (content is None or told["If-Match"] != etag(content)))
            or (generation is not None and int(generation) != self.lax.generations.get(key, 0))
        )

    def do_POST(self) -> None:
        key, query, body = self.asked()
        if "uploads" in query:
            upload = str(len(self.lax.uploads))
            self.lax.uploads[upload] = {}
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket/><Key>{escape(key)}</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
            )
        elif "delete" in query:
            gone = re.findall("<Key>(.*?)</Key>", body.decode())
            for each in gone:
                self.lax.drop(f"{key}/{each}")
            told = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in gone)
            self.answer(200, f"<DeleteResult>{told}</DeleteResult>")
        else:
            parts = self.lax.uploads.pop(query["uploadId"])
            self.lax.keep(key, b"".join(parts[number] for number in sorted(parts)))
            self.answer(
                200,
                f"<CompleteMultipartUploadResult><Location/><Bucket/><Key>{escape(key)}</Key>"
                f"<ETag>{escape(etag(self.lax.objects[key]))}</ETag>"
                "</CompleteMultipartUploadResult>",
            )

    def do_DELETE(self) -> None:
        key, query, _ = self.asked()
        if "uploadId" in query:
            self.lax.uploads.pop(query["uploadId"], None)
        else:
            self.lax.drop(key)
        self.answer(204)

    def do_GET(self) -> None:
        key, query, _ = self.asked()
        if "list-type" in query:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            self.answer(200, self.lax.listing(key, prefix, delimiter))
            return
        content = self.lax.objects.get(key)
        if content is None:
            self.answer(404, "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            return
        if not self.may(key):
            self.answer(412, "<Error><Code>PreconditionFailed</Code></Error>")
            return
        begin, end, status = 0, len(content), 200
        headers = {"ETag": etag(content), "Last_Modified": DATE, **self._generation(key)}
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, status = int(match[1]), 206
            end = min(end, int(match[2]) + 1) if match[2] else end
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        if self.command == "HEAD":
            headers["Content_Length"] = str(len(content))
        self.answer(status, content[begin:end], **headers)

    do_HEAD = do_GET


if __name__ == "__main__":
    with Lax(heeds=True, drains=True) as serving:
        print(serving.port, flush=True)
        sys.stdin.read()
