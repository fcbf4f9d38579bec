"""Brings the replica groups that torchft replaces up from a healthy one.

    from fastckpt.integrations.torchft import Transport
    manager = torchft.Manager(..., checkpoint_transport=Transport(address="10.0.0.5"))

The source serves a copy of its state from this node's memory, so that training may go on while it
is read. A receiver verifies every byte before it returns the state.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torchft.checkpointing.transport import CheckpointTransport

from fastckpt import SaveOptions, load, save
from fastckpt.errors import CheckpointError, CorruptCheckpoint, PeerFailed
from fastckpt.formats import torch_zip
from fastckpt.ranks.peer_link import HANDSHAKE_S, Listener, PeerLink, connected
from fastckpt.saving import pipeline
from fastckpt.saving.handle import SaveHandle
from fastckpt.storage import atomic

log = logging.getLogger("fastckpt")

T = TypeVar("T")
_ATTEMPTS_MAX = 3  # at one source that sends damaged bytes or closes the connection
_RETRY_S, _HEAD_BYTES = 0.05, 4096


class _Snapshot:
    """A copy of the state of a step, in a file in memory that nobody changes."""

    def __init__(self, step: int, path: str, handle: SaveHandle) -> None:
        self.step = step
        self._path, self._handle = path, handle

    def opened(self, until: float) -> int:
        """Returns a descriptor of the file once it is complete. Raises the error of its save."""
        self._handle.result(max(0.0, until - time.monotonic()))
        return pipeline.current().storage.open(self._path)

    def end(self) -> None:
        """Removes the file. Its memory is freed when the last receiver has read it."""
        self._handle.cancel()
        self._handle.add_done_callback(lambda _handle: _remove(self._path))


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # its save was cancelled before
        pipeline.current().storage.remove(path)


class Transport(CheckpointTransport[T], Generic[T]):  # type: ignore[misc]
    """A CheckpointTransport of torchft that sends a verified copy of the state over TCP.

    send_checkpoint() returns when the state is copied to this node's memory. The copy is served
    until disallow_checkpoint(), which waits for nobody: a receiver that has begun to read goes on,
    and the memory is freed after it. recv_checkpoint() returns only a state of which every byte was
    verified; no tensor changes before that. Connections need the secret that metadata() contains.

    The tensors of the state are returned on the CPU, and a DTensor with the mesh that it was sent
    with, like by torchft's HTTPTransport; pass `state_dict` to get them in place.

    Args:
        address: the address of this node at which it listens, such as "10.0.0.5". Default: that of
            its host name.
        state_dict: returns the receiver's own state. Its tensors and DTensors with the same shape
            and dtype as those received get the values in place, after all are verified.
        fallback: called as fallback(step) if the source fails, stalls or sends damaged bytes;
            returns the state of exactly this step, for example from a Checkpointer, or None if it
            is not available.
        directory: a directory in memory with room for one state to send and one to receive.
        weights_only: like torch.load's.

    Raises:
        OSError: this node cannot listen at the address, or the directory cannot be written.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        state_dict: Callable[[], T] | None = None,
        fallback: Callable[[int], T | None] | None = None,
        directory: str | os.PathLike[str] = "/dev/shm",
        weights_only: bool = True,
    ) -> None:
        self._own, self._fallback, self._weights_only = state_dict, fallback, weights_only
        self._snapshot: _Snapshot | None = None
        self._last: SaveHandle | None = None
        self._changed, self._is_closed = threading.Condition(), False
        self._count = 0
        storage = pipeline.current().storage
        atomic.remove_dead_directories(storage, os.fspath(directory))
        self._directory = atomic.temporary_path(os.path.join(directory, "fastckpt-healing"))
        storage.make_directory(self._directory)
        try:
            self._listener = Listener(address or _own_address())
        except BaseException:
            storage.remove_directory(self._directory)
            raise
        self._secret = os.urandom(32)
        self._listener.start(self._secret, self._serve)

    def metadata(self) -> str:
        """Returns the address and the secret with which receivers connect, as JSON."""
        host, port = self._listener.address
        return json.dumps({"host": host, "port": port, "secret": self._secret.hex()})

    # ---- the source

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Copies a state to this node's memory and begins to serve it, instead of the one before.
        Returns when the state may be changed.

        Args:
            dst_ranks: not used, since every replica that has the metadata may read the state.
            step: the step of the state.
            state_dict: the state.
            timeout: how long the copy may take.

        Raises:
            CheckpointError: the state could not be copied.
            ValueError: the timeout is not positive.
        """
        self.disallow_checkpoint()
        self._wait_last()
        self._count += 1
        path = os.path.join(self._directory, f"{self._count}.pt")
        within_s = timeout.total_seconds()
        options = SaveOptions(durable=False, on_error="warn", timeout_s=within_s)
        self._last = save(state_dict, path, options=options)
        snapshot = _Snapshot(step, path, self._last)
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Ends the serving of the last state to further receivers. Returns at once."""
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.end()

    def _wait_last(self) -> None:
        """Waits until the copy of the last state, which has been cancelled, has ended."""
        if self._last is not None:
            self._last.exception()

    def _serve(self, link: PeerLink) -> None:
        """Serves one receiver, on a thread of the listener."""
        link.limit(time.monotonic() + HANDSHAKE_S)
        request = link.receive()
        try:
            step, begin = int(request["step"]), int(request["begin"])
            until = time.monotonic() + float(request["within_s"])
            fd = self._awaited(step, until).opened(until)
        except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
            link.send({"error": str(error) or type(error).__name__})
            return
        try:
            link.limit(until)
            nbytes = os.fstat(fd).st_size
            link.send({"step": step, "nbytes": nbytes})
            link.send_file(fd, nbytes, begin)
        finally:
            os.close(fd)

    def _awaited(self, step: int, until: float) -> _Snapshot:
        """Returns the snapshot of a step when it is there. Raises TimeoutError, CheckpointError."""

        def is_settled() -> bool:
            snapshot = self._snapshot
            return self._is_closed or (snapshot is not None and snapshot.step >= step)

        with self._changed:
            if not self._changed.wait_for(is_settled, max(0.0, until - time.monotonic())):
                raise TimeoutError(f"timed out before it had step {step}")
            snapshot = self._snapshot
        if snapshot is None or snapshot.step != step:
            now = "is shut down" if snapshot is None else f"is at step {snapshot.step}"
            raise CheckpointError(f"it {now} and does not serve step {step}")
        return snapshot

    # ---- the receiver

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Reads a state from its source, or takes it from `fallback`.

        Args:
            src_rank: the replica rank of the source, for messages.
            metadata: what the source's metadata() returned.
            step: the step of the state.
            timeout: how long the transfer may take.

        Raises:
            PeerFailed: the source failed, stalled or sent damaged bytes; the message names it.
            CheckpointError: the state could not be stored or read here.
            pickle.UnpicklingError: with weights_only, the state has objects of other classes.
        """
        until = time.monotonic() + timeout.total_seconds()
        source = f"replica {src_rank}"
        try:
            at = json.loads(metadata)
            source += f" at {at['host']}:{at['port']}"
            address, secret = (str(at["host"]), int(at["port"])), bytes.fromhex(at["secret"])
            state: T = self._received(address, secret, step, until)
        except (OSError, CheckpointError, KeyError, TypeError, ValueError) as error:
            what = f"step {step} could not be received from {source}: {error}"
            other = None if self._fallback is None else self._fallback(step)
            if other is None:
                raise PeerFailed(what, (src_rank,)) from error
            log.warning("%s; it was taken from the fallback instead", what)
            state = other
        return state if self._own is None else _put(self._own(), state)

    def _received(self, address: tuple[str, int], secret: bytes, step: int, until: float) -> Any:
        fd, path = tempfile.mkstemp(dir=self._directory)
        try:
            for attempt in range(_ATTEMPTS_MAX):
                is_last = attempt == _ATTEMPTS_MAX - 1
                try:
                    self._fetch(fd, address, secret, step, until)
                    if not torch_zip.is_marked(os.pread(fd, _HEAD_BYTES, 0)):
                        raise CorruptCheckpoint("what it sent has no checksums")
                    return load(
                        path, map_location="cpu", weights_only=self._weights_only, mmap=True
                    )
                except CorruptCheckpoint:  # the damage may be of this transfer
                    os.ftruncate(fd, 0)
                    if is_last:
                        raise
                except ConnectionError:  # what has come stays
                    if is_last or time.monotonic() + _RETRY_S >= until:
                        raise
                    time.sleep(_RETRY_S)
            raise AssertionError("the last attempt returns or raises")
        finally:
            os.close(fd)
            _remove(path)  # the state's tensors keep its memory
            if self._is_closed:
                self._remove_directory()

    def _fetch(
        self, fd: int, address: tuple[str, int], secret: bytes, step: int, until: float
    ) -> None:
        """Appends the bytes that are missing to a file. Raises OSError, CheckpointError."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        begin = os.fstat(fd).st_size
        with connected(address, secret, left_s) as link:
            link.send({"step": step, "begin": begin, "within_s": left_s})
            answer = link.receive()
            nbytes = answer.get("nbytes")
            if answer.get("step") != step or type(nbytes) is not int or nbytes < begin:
                raise CheckpointError(str(answer.get("error", "it answered something else")))
            room = os.statvfs(self._directory)
            if nbytes - begin > room.f_bavail * room.f_frsize:
                raise CheckpointError(f"{self._directory!r} has no room for {nbytes} bytes")
            for part in link.receive_parts(nbytes - begin):
                os.pwrite(fd, part, begin)
                begin += len(part)
            link.send({})

    def shutdown(self, wait: bool = True) -> None:
        """Stops serving, breaks off open connections, and frees all memory. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._listener.close()
        self.disallow_checkpoint()
        self._wait_last()
        self._remove_directory()

    def _remove_directory(self) -> None:
        with suppress(OSError):  # another thread still receives, and removes it then
            pipeline.current().storage.remove_directory(self._directory)


def _own_address() -> str:
    """Returns the address of this machine's name, at which other machines reach it."""
    name = socket.gethostname()
    address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    if address == "::1" or address.startswith("127."):
        log.warning(
            "the name of this host, %s, leads to %s, which other hosts cannot reach: pass "
            "Transport(address=...) with an address of this host, such as `hostname -I` shows",
            name,
            address,
        )
    return address


def _put(own: Any, got: Any) -> Any:
    """Returns a received nest in which tensors of the own nest take the place of like ones, after
    they got the values.
    """
    if isinstance(own, torch.Tensor) and isinstance(got, torch.Tensor):
        if _form(own) != _form(got):
            return got
        _local(own).copy_(_local(got))
        return own
    if isinstance(own, dict) and isinstance(got, dict):
        return {key: _put(own.get(key), value) for key, value in got.items()}
    if type(own) in (list, tuple) and type(own) is type(got) and len(own) == len(got):
        return type(got)(map(_put, own, got))
    return got


def _form(tensor: Any) -> tuple[Any, ...]:
    """Returns what tensors must have in common so that one can get the other's values."""
    mesh = getattr(tensor, "device_mesh", None)
    spread = (*mesh.shape, *map(str, tensor.placements)) if mesh is not None else ()
    return tensor.shape, tensor.dtype, _local(tensor).shape, spread


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return local
