"""PeerLink and Listener: connections over which the ranks of one job send files to each other.

Both sides prove by HMAC that they have the job's secret, and no data is sent to a stranger.
Messages are small JSON texts; files are sent from page cache to page cache.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from fastckpt.latch import start_thread

log = logging.getLogger("fastckpt")

HANDSHAKE_S = 5.0  # for a connection to show that it is of the job
SERVED_MAX = 8  # connections that a rank serves at a time
_UNPROVEN_MAX = 32  # connections that have not shown it yet; one more ends the oldest of them
PART_BYTES = 1 << 20  # of a file that comes: it is in the processor's cache until it is written
_MESSAGE_BYTES_MAX = 1 << 16
_SENT_AT_ONCE = 8 << 20
_PACING = 47  # SO_MAX_PACING_RATE of socket(7), which the socket module does not name
_PACING_MAX = (1 << 32) - 1  # what a 32-bit option can say; means: none
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("ll")  # a timeval
_CHALLENGE_BYTES = _DIGEST_BYTES = 32

_listeners: WeakSet[Listener] = WeakSet()


class PeerLink:
    """A connection to another rank. Every method raises OSError, including TimeoutError.

    Args:
        peer: the socket.
        until: the deadline, by time.monotonic(), for all operations.
    """

    def __init__(self, peer: socket.socket, until: float) -> None:
        self._socket, self._until = peer, until
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, until: float, rate: float | None = None) -> None:
        """Sets a new deadline, and the maximum rate of sending in bytes per second."""
        self._until = until
        if rate is not None:
            paced = min(int(rate), _PACING_MAX)
            self._socket.setsockopt(socket.SOL_SOCKET, _PACING, paced)

    def _left_s(self) -> float:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def _send(self, content: bytes) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(content)

    def receive_bytes(self, nbytes: int) -> bytes:
        """Receives and returns exactly nbytes bytes."""
        content = bytearray(nbytes)
        self._receive_into(memoryview(content))
        return bytes(content)

    def receive_parts(self, nbytes: int) -> Iterator[memoryview]:
        """Receives exactly nbytes bytes; yields them in parts of PART_BYTES, which all use the same
        memory.
        """
        part = memoryview(bytearray(min(nbytes, PART_BYTES)))
        for at in range(0, nbytes, PART_BYTES):
            part = part[: nbytes - at]
            self._receive_into(part)
            yield part

    def _receive_into(self, memory: memoryview) -> None:
        # The kernel waits until all of it is there, which takes half the time of many small reads.
        self._socket.settimeout(None)
        while memory:
            left_s = max(self._left_s(), 1e-3)
            time_value = _TIME.pack(int(left_s), int(left_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_value)
            with suppress(BlockingIOError):  # the time is over
                got = self._socket.recv_into(memory, 0, socket.MSG_WAITALL)
                if not got:
                    raise ConnectionResetError("it closed the connection")
                memory = memory[got:]

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        content = json.dumps(message).encode()
        self._send(_LENGTH.pack(len(content)) + content)

    def receive(self) -> dict[str, Any]:
        """Receives and returns the next message."""
        (nbytes,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if nbytes > _MESSAGE_BYTES_MAX:
            raise ConnectionAbortedError(f"a message of {nbytes} bytes does not belong to this job")
        try:
            message = json.loads(self.receive_bytes(nbytes))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("a message does not belong to this job")
        return message

    def send_file(self, fd: int, nbytes: int, begin: int = 0) -> dict[str, Any]:
        """Sends the first nbytes bytes of a file except those before `begin`; returns the answer
        that the receiver sends at the end. Until then the file must stay open and unchanged,
        because the kernel sends its pages, not copies.
        """
        at, poll = begin, select.poll()
        poll.register(self._socket, select.POLLOUT)
        while at < nbytes:
            left_s = self._left_s()
            self._socket.settimeout(0.0)
            if not poll.poll(left_s * 1000):
                raise TimeoutError("timed out")
            with suppress(BlockingIOError):  # poll(2) promised too much
                sent = os.sendfile(self._socket.fileno(), fd, at, min(_SENT_AT_ONCE, nbytes - at))
                if not sent:
                    raise ConnectionAbortedError(f"the file has {at} bytes, not {nbytes}")
                at += sent
        return self.receive()

    def prove(self, secret: bytes, is_listening: bool) -> None:
        """Proves to the other side that this side has the secret, and verifies the same of the
        other side. The connecting side proves it first, so that a stranger learns nothing.
        """
        own, (mine, theirs) = os.urandom(_CHALLENGE_BYTES), (b"listens", b"connects")
        if not is_listening:
            mine, theirs = theirs, mine
        self._send(own)
        other = self.receive_bytes(_CHALLENGE_BYTES)
        if not is_listening:
            self._send(_digest(secret, mine, other, own))
        if not hmac.compare_digest(
            self.receive_bytes(_DIGEST_BYTES), _digest(secret, theirs, own, other)
        ):
            raise PermissionError("it could not prove that it belongs to this job")
        if is_listening:
            self._send(_digest(secret, mine, other, own))


def _digest(secret: bytes, role: bytes, asked: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, role + asked + own, "sha256")


@contextmanager
def connected(address: tuple[str, int], secret: bytes, within_s: float) -> Iterator[PeerLink]:
    """Yields a connection to the rank that listens at an address. Raises OSError."""
    until = time.monotonic() + within_s
    with socket.create_connection(address, within_s) as peer:
        try:
            link = PeerLink(peer, until)
            link.prove(secret, is_listening=False)
            yield link
        finally:
            _hang_up(peer)


def _hang_up(peer: socket.socket) -> None:
    """Ends a connection for both sides, even if a child of fork() also has the socket."""
    with suppress(OSError):  # it has ended already
        peer.shutdown(socket.SHUT_RDWR)


class Listener:
    """A port at which a rank serves the other ranks of its job.

    Args:
        host: the address to listen at; OSError is raised if this machine does not have it.

    Attributes:
        address: the address and the port.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._free, self._closed = threading.Semaphore(SERVED_MAX), False
        self._peers: set[socket.socket] = set()
        self._unproven: list[socket.socket] = []  # the oldest first
        _listeners.add(self)

    def start(self, secret: bytes, serve: Callable[[PeerLink], None]) -> None:
        """Starts to serve connections, each on its own thread. `serve` returns when it is done with
        a connection, and raises OSError if the connection breaks.
        """
        start_thread(lambda: self._accept(secret, serve), "fastckpt-listener", daemon=True)

    def _accept(self, secret: bytes, serve: Callable[[PeerLink], None]) -> None:
        while not self._closed:
            try:
                peer, _address = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    log.debug("no connection was accepted: %s", error)
                    time.sleep(0.1)
                continue

            # Strangers, however many, take no place of the job's ranks.
            self._unproven.append(peer)
            for oldest in self._unproven[:-_UNPROVEN_MAX]:
                self._count_out(oldest)
                _hang_up(oldest)
            run = partial(self._serve, peer, secret, serve)
            if not start_thread(run, "fastckpt-peer", daemon=True):
                self._count_out(peer)
                peer.close()

    def _count_out(self, peer: socket.socket) -> None:
        """Removes a connection from those that have not proved the secret yet."""
        with suppress(ValueError):  # it had to make room
            self._unproven.remove(peer)

    def _serve(self, peer: socket.socket, secret: bytes, serve: Callable[[PeerLink], None]) -> None:
        with peer:
            self._peers.add(peer)
            if self._closed:
                _hang_up(peer)
            try:
                link = PeerLink(peer, time.monotonic() + HANDSHAKE_S)
                try:
                    link.prove(secret, is_listening=True)
                finally:
                    self._count_out(peer)
                with self._free:
                    serve(link)
            except OSError as error:
                log.debug("a connection to %s ended: %s", self.address, error)
            finally:
                self._peers.discard(peer)
                _hang_up(peer)

    def close(self) -> None:
        """Stops serving, and breaks off open connections. Idempotent."""
        self._closed = True
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._socket.close()
        for peer in [*self._peers]:
            _hang_up(peer)


def _forsake_all() -> None:
    """Closes the ports in a child of fork(), because the child serves no connections."""
    for listener in [*_listeners]:
        listener._socket.close()


os.register_at_fork(after_in_child=_forsake_all)


def address_towards(host: str, port: int) -> str:
    """Returns the address from which this machine reaches another one. Raises OSError."""
    family, kind, protocol, _name, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
