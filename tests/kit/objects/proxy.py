"""A proxy before a server of S3 that counts what passes, and fails as networks and servers do.

Requests and answers pass as they are, signatures included. A fault is told by the kind of request
that it meets and by what becomes of it. Must not know what is stored.
"""

from __future__ import annotations

import functools
import http.client
import socket
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK = 1 << 20
XML = "application/xml"
# What is not passed on from one connection to the other.
_OF_A_CONNECTION = {"connection", "transfer-encoding", "content-length", "keep-alive"}


def error_text(code: str, message: str = "") -> bytes:
    """The document in which servers of S3 describe an error."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message or code}</Message></Error>"
    ).encode()


class Request:
    """A request as faults see it.

    Attributes:
        kind: put, create (a put of what must not be there), begin, part, complete, abort, get,
            head, list, or delete.
        key: with the bucket.
        part: the number of the part, of a part.
        nbytes: of its body.
        query: what its URL asks for, by name.
    """

    def __init__(self, method: str, target: str, headers: Any, stream: Any) -> None:
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.method, self.target, self.headers, self.query = method, target, headers, query
        self.kind = kind_of(method, query, headers)
        self.key = urllib.parse.unquote(url.path)[1:]
        self.part = int(query.get("partNumber", 0))
        self.nbytes = int(headers.get("Content-Length", 0))
        self._stream = stream

    @functools.cached_property
    def body(self) -> bytes:
        """What the client sends; not read before it is asked for."""
        return bytes(self._stream.read(self.nbytes))


def kind_of(method: str, query: dict[str, str], headers: Any) -> str:
    if method == "PUT":
        if "partNumber" in query:
            return "part"
        return "create" if headers.get("If-None-Match") else "put"
    if method == "POST":
        return "begin" if "uploads" in query else "delete" if "delete" in query else "complete"
    if method == "DELETE":
        return "abort" if "uploadId" in query else "delete"
    return "list" if "list-type" in query or "uploads" in query else method.lower()


class Passage:
    """One request on its way: a fault answers it, passes it on, or lets the connection die."""

    def __init__(self, request: Request, handler: Any, passed: Callable[[Request], Any]) -> None:
        self.request = request
        self._handler = handler
        self._passed = passed

    def ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server answers: its status, headers and body."""
        answer: tuple[int, list[tuple[str, str]], bytes] = self._passed(self.request)
        return answer

    def answer(
        self, status: int, body: bytes = b"", headers: list[tuple[str, str]] | None = None
    ) -> None:
        """Answers instead of the server, or with what it has said."""
        self._handler.answer(status, headers or [("Content-Type", XML)], body)

    def cut(self, answered: tuple[int, list[tuple[str, str]], bytes] | None = None) -> None:
        """Ends the connection: before an answer, or in the midst of the body of this one."""
        if answered is not None:
            status, headers, body = answered
            self._handler.answer(status, headers, body, told=len(body) // 2)
        self._handler.die()


Fault = Callable[[Passage], None]


def busy(passage: Passage) -> None:
    """503, as S3 answers who asks too often."""
    passage.answer(503, error_text("SlowDown", "Please reduce your request rate."))


def cut(passage: Passage) -> None:
    """The connection breaks: in the midst of what is read, else before the server has the whole."""
    if passage.request.kind == "get":
        passage.cut(passage.ask())
    else:
        passage.cut()  # with the body not read


def lost(passage: Passage) -> None:
    """The server does as it was told; its answer is lost."""
    passage.ask()
    passage.cut()


def error_in_200(passage: Passage) -> None:
    """S3 answers the completion of an upload with 200 before it knows how it ends."""
    passage.answer(200, error_text("InternalError", "We encountered an internal error."))


def no_such_upload(passage: Passage) -> None:
    """404, as some servers answer who completes an upload again."""
    passage.answer(404, error_text("NoSuchUpload", "The upload does not exist."))


def expired(passage: Passage) -> None:
    """403: the token has expired."""
    passage.answer(403, error_text("ExpiredToken", "The provided token has expired."))


def over_quota(passage: Passage) -> None:
    """403, as Ceph answers who has used up a quota."""
    passage.answer(403, error_text("QuotaExceeded", "The quota of the bucket is exceeded."))


def full(passage: Passage) -> None:
    """507, as MinIO answers where its disks are full."""
    passage.answer(507, error_text("XMinioStorageFull", "Storage backend has reached its limit."))


class Stall:
    """Requests that are neither passed on nor answered until the test says so; they are lost then.

    Args:
        passes: they are passed on then.
    """

    def __init__(self, passes: bool = False) -> None:
        self._passes = passes
        self.met = threading.Event()
        self.over = threading.Event()

    def __call__(self, passage: Passage) -> None:
        self.met.set()
        self.over.wait(120)
        if self._passes:
            status, headers, body = passage.ask()
            passage.answer(status, body, headers)
        else:
            passage.cut()


class Backwards:
    """Passes so many requests on in the order that is the reverse of that in which they came."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._turn = threading.Condition()
        self._came = self._went = 0
        self.came: list[int] = []
        self.order: list[int] = []

    def __call__(self, passage: Passage) -> None:
        with self._turn:
            mine = self._came
            self._came += 1
            self.came.append(passage.request.part)
            self._turn.notify_all()
            turn = self._count - 1 - mine
            assert self._turn.wait_for(lambda: self._went == turn, 60), "the others did not come"
        answered = passage.ask()
        status, headers, body = answered
        passage.answer(status, body, headers)
        with self._turn:
            self.order.append(passage.request.part)
            self._went += 1
            self._turn.notify_all()


@dataclass
class _Trap:
    kind: str
    fault: Fault
    key: str
    skip: int
    times: int


@dataclass
class Traffic:
    """Counts of what has passed.

    Attributes:
        requests: by kind.
        bytes_in, bytes_out: of the bodies that clients have sent, and were sent; by kind.
    """

    requests: Counter[str] = field(default_factory=Counter)
    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)


class Proxy:
    """A proxy at a port of its own.

    Args:
        port: of the server, at this machine.

    Attributes:
        port: of the proxy.
        traffic: what has passed since the last call of count().
        asked: keys and kinds of the requests since then, in the order in which they came.
    """

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.traffic = Traffic()
        self.asked: list[tuple[str, str]] = []
        self._traps: list[_Trap] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        outer = self

        class Handler(_Handler):
            proxy = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            connections = [*self._connections]
        for each in connections:
            with suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)

    def on(self, kind: str, fault: Fault, *, key: str = "", skip: int = 0, times: int = 1) -> None:
        """Lets a fault meet requests.

        Args:
            kind: see Request; "" for any.
            key: a part of the key.
            skip: how many of them pass first.
            times: how many it meets.
        """
        with self._lock:
            self._traps.append(_Trap(kind, fault, key, skip, times))

    def heal(self) -> None:
        """Ends all faults."""
        with self._lock:
            self._traps.clear()

    def count(self) -> Traffic:
        """Counts anew; returns what was counted."""
        with self._lock:
            counted, self.traffic = self.traffic, Traffic()
            self.asked = []
        return counted

    def note(self, request: Request) -> Fault | None:
        """Counts a request; returns the fault that it meets."""
        with self._lock:
            self.traffic.requests[request.kind] += 1
            self.traffic.bytes_in[request.kind] += request.nbytes
            self.asked.append((request.kind, request.key))
            for trap in self._traps:
                if trap.kind in ("", request.kind) and trap.key in request.key and trap.times:
                    if trap.skip:
                        trap.skip -= 1
                        continue
                    trap.times -= 1
                    return trap.fault
        return None

    def note_answer(self, request: Request, nbytes: int) -> None:
        with self._lock:
            self.traffic.bytes_out[request.kind] += nbytes


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one to the server for it."""

    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    rbufsize = CHUNK

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None
        self.proxy._connections.add(self.connection)

    def finish(self) -> None:
        self.proxy._connections.discard(self.connection)
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError):  # the client is gone
            super().finish()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, http.client.HTTPException):  # one of the two sides is gone
            self.close_connection = True

    def _serve(self) -> None:
        self._head = self.command == "HEAD"
        request = Request(self.command, self.path, self.headers, self.rfile)
        self._request = request
        fault = self.proxy.note(request)
        passage = Passage(request, self, self._ask)
        if fault is not None:
            fault(passage)
        else:
            status, headers, body = passage.ask()
            passage.answer(status, body, headers)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _ask(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.server_port, timeout=120)
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
        upstream.putrequest(
            request.method, request.target, skip_host=True, skip_accept_encoding=True
        )
        for name, value in request.headers.items():
            if name.lower() not in _OF_A_CONNECTION:
                upstream.putheader(name, value)
        if request.nbytes or request.method in ("PUT", "POST"):
            upstream.putheader("Content-Length", str(request.nbytes))
        upstream.endheaders(request.body)
        answer = upstream.getresponse()
        body = answer.read()
        headers = answer.getheaders()
        self._upstream = upstream
        return answer.status, headers, body

    def answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        told: int | None = None,
    ) -> None:
        """Answers; `told`: how much of the body is sent, before the connection ends."""
        _ = self._request.body  # the next request comes behind it
        length = dict((k.lower(), v) for k, v in headers).get("content-length")
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, value)
        if self._head and length is not None:
            self.send_header("Content-Length", length)
        elif status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not self._head:
            sent = body if told is None else body[:told]
            self.proxy.note_answer(self._request, len(sent))
            self.wfile.write(sent)
        self.wfile.flush()

    def die(self) -> None:
        """Ends the connection as a broken network does."""
        self.close_connection = True
        with suppress(OSError):  # the client may have been first
            self.connection.shutdown(socket.SHUT_RDWR)
