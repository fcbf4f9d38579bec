"""A stub of Azure Blob Storage: blobs that are put, or committed from blocks, on conditions. It
checks no signature. Must not know what is stored.
"""

from __future__ import annotations

import re
import urllib.parse
from xml.sax.saxutils import escape

from tests.kit.objects.lax import DATE, S3Handler, etag


class AzureHandler(S3Handler):
    """One connection of a client, to be had as a kind of Lax."""

    def do_PUT(self) -> None:
        key, query, body = self.asked()
        blocks = self.lax.uploads.setdefault(key, {})
        if query.get("comp") == "block":
            blocks[query["blockid"]] = body
            self.answer(201)
            return
        if not self.may(key):
            exists = self.headers.get("If-None-Match") == "*"
            code = "BlobAlreadyExists" if exists else "ConditionNotMet"
            self.answer(409 if exists else 412, f"<Error><Code>{code}</Code></Error>")
            return
        if query.get("comp") == "blocklist":
            listed = re.findall("<Uncommitted>(.*?)</Uncommitted>", body.decode())
            body = b"".join(blocks[each] for each in listed)
            del self.lax.uploads[key]
        self.lax.keep(key, body)
        self.answer(201, ETag=etag(body), Last_Modified=DATE)

    def do_POST(self) -> None:
        """A batch of deletions."""
        _key, _query, body = self.asked()
        answers = []
        for path, number in zip(
            re.findall(r"DELETE /(\S+) HTTP", body.decode()),
            re.findall(r"Content-ID: (\d+)", body.decode()),
            strict=True,
        ):
            key = urllib.parse.unquote(path)
            status = "202 Accepted" if key in self.lax.objects else "404 Not Found"
            code = "" if key in self.lax.objects else "x-ms-error-code: BlobNotFound\r\n"
            self.lax.drop(key)
            answers.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\n{code}\r\n"
            )
        told = "".join(answers) + "--batch--\r\n"
        self.answer(202, told, Content_Type="multipart/mixed; boundary=batch")

    def do_DELETE(self) -> None:
        key, _query, _body = self.asked()
        self.lax.drop(key)
        self.answer(202)

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        if query.get("comp") != "list":
            super().do_GET()
            return
        container = urllib.parse.unquote(url.path).strip("/")
        begin, delimiter = f"{container}/{query.get('prefix', '')}", query.get("delimiter", "")
        told, prefixes = [], set()
        for key, content in sorted(self.lax.objects.items()):
            name = key[len(container) + 1 :]
            if not key.startswith(begin) or name < query.get("startFrom", ""):
                continue
            rest = key[len(begin) :]
            if delimiter and delimiter in rest:
                prefixes.add(name[: len(name) - len(rest)] + rest.split(delimiter)[0] + delimiter)
                continue
            told.append(
                f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{DATE}"
                f"</Last-Modified><Etag>{escape(etag(content))}</Etag><Content-Length>"
                f"{len(content)}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
            )
        told += [f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in prefixes]
        whole = f"<Blobs>{''.join(told)}</Blobs><NextMarker />"
        self.answer(200, f"<EnumerationResults>{whole}</EnumerationResults>")

    do_HEAD = do_GET
