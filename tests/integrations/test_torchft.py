"""torchft's contract of a checkpoint transport: what a receiver gets is the source's state of that
step, bit by bit, or a named error within the time-out; and no receiver holds the source up.

On torchft's own classes where it is installed, else on a double of the base class.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import unittest
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch

import fastckpt
from fastckpt.errors import PeerFailed, StorageError
from fastckpt.ranks.peer_link import Listener, PeerLink, connected
from tests.kit.inference import importable, installed
from tests.kit.paths import ROOT
from tests.kit.saves import wait_until
from tests.kit.storm import Storm

T = TypeVar("T")
HOST, TIMEOUT, SHORT = "127.0.0.1", timedelta(seconds=60), timedelta(seconds=2)
WEIGHT = 3 << 20  # elements: two blocks


class CheckpointTransport(ABC, Generic[T]):
    """torchft's base class, whose methods are all abstract but for disallow_checkpoint()."""


NAMES = ("torchft", "torchft.checkpointing", "torchft.checkpointing.transport")
DOUBLE: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
DOUBLE[NAMES[-1]] = {"CheckpointTransport": CheckpointTransport}


@pytest.fixture(scope="module")
def torchft() -> Iterator[ModuleType]:
    """fastckpt's adapter."""
    with importable(DOUBLE, "torchft"):
        from fastckpt.integrations import torchft

        yield torchft
    del sys.modules[torchft.__name__]


@pytest.fixture
def made(torchft: ModuleType, memory: Path) -> Iterator[Callable[..., Any]]:
    """Makes transports; nothing of them is left when they are shut down."""
    transports = []

    def make(**options: Any) -> Any:
        transports.append(torchft.Transport(**{"address": HOST, "directory": memory, **options}))
        return transports[-1]

    yield make
    for transport in transports:
        transport.shutdown()
        transport.shutdown()
    wait_until(lambda: not os.listdir(memory), "all memory is free")


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(WEIGHT, generator=generator)
    user = {"model": {"weight": weight, "bf16": weight[:999].bfloat16()}, "lr": 0.1 * step}
    return {
        "user": {"default": user, "list": [torch.arange(step + 1), (step, "text")]},
        "torchft": {"step": step, "batches_committed": 2 * step},
    }


def assert_is(got: Any, step: int) -> None:
    wanted = state(step)
    assert got["torchft"] == wanted["torchft"]
    (own, pair), (its, other) = got["user"]["list"], wanted["user"]["list"]
    assert torch.equal(own, its) and pair == other
    mine, theirs = got["user"]["default"], wanted["user"]["default"]
    assert mine["lr"] == theirs["lr"] and mine["model"].keys() == theirs["model"].keys()
    for name, tensor in theirs["model"].items():
        assert mine["model"][name].dtype == tensor.dtype
        assert torch.equal(mine["model"][name], tensor), name


# ---- what a receiver gets


def test_a_state_comes_as_it_was_sent_whatever_happens_to_it_then(
    made: Callable[..., Any], memory: Path
) -> None:
    source, receiver = made(), made()
    for step in (1, 2):
        sent = state(step)
        source.send_checkpoint([1], step, sent, TIMEOUT)
        sent["user"]["default"]["model"]["weight"].zero_()  # training goes on
        for _ in range(2):
            assert_is(receiver.recv_checkpoint(0, source.metadata(), step, TIMEOUT), step)
        source.disallow_checkpoint()
        wait_until(lambda: not [*memory.glob("*/*")], "the memory of the copy is free")


def test_a_receiver_may_ask_before_the_state_is_there(made: Callable[..., Any]) -> None:
    source, receiver = made(), made()
    got = list[Any]()

    def receive() -> None:
        got.append(receiver.recv_checkpoint(0, source.metadata(), 5, TIMEOUT))

    thread = threading.Thread(target=receive)
    thread.start()
    source.send_checkpoint([1], 4, state(4), TIMEOUT)  # another step is not its
    source.send_checkpoint([1], 5, state(5), TIMEOUT)
    thread.join()
    assert_is(got[0], 5)


def test_several_receivers_read_at_once(made: Callable[..., Any]) -> None:
    source, receivers = made(), [made() for _ in range(3)]
    source.send_checkpoint([1, 2, 3], 7, state(7), TIMEOUT)
    got = dict[int, Any]()

    def receive(number: int) -> None:
        got[number] = receivers[number].recv_checkpoint(0, source.metadata(), 7, TIMEOUT)

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert_is(got[number], 7)


def test_tensors_of_the_receiver_get_the_values_in_place(made: Callable[..., Any]) -> None:
    own = state(0)
    source, receiver = made(), made(state_dict=lambda: own)
    weight, other = own["user"]["default"]["model"]["weight"], torch.zeros(3)
    own["user"]["default"]["model"]["bf16"] = other  # of another shape
    source.send_checkpoint([1], 9, state(9), TIMEOUT)
    got = receiver.recv_checkpoint(0, source.metadata(), 9, TIMEOUT)
    assert_is(got, 9)
    assert got["user"]["default"]["model"]["weight"] is weight
    assert not other.any()


def test_the_state_of_a_module_is_filled_in_place(made: Callable[..., Any]) -> None:
    model = torch.nn.Linear(4, 3)
    source, receiver = made(), made(state_dict=lambda: {"user": {"model": model.state_dict()}})
    sent = torch.nn.Linear(4, 3).state_dict()
    source.send_checkpoint([1], 9, {"user": {"model": sent}}, TIMEOUT)
    receiver.recv_checkpoint(0, source.metadata(), 9, TIMEOUT)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, sent[name]), name


def test_nothing_of_the_receiver_changes_if_the_transfer_fails(made: Callable[..., Any]) -> None:
    own = state(0)
    receiver = made(state_dict=lambda: own)
    lying = liar(lambda link, content: send_whole(link, flipped(content, -5000)))
    with lying as metadata, pytest.raises(PeerFailed):
        receiver.recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert_is(own, 0)


# ---- a source is held up by nobody


def test_a_slow_receiver_reads_on_while_the_source_trains_on(
    made: Callable[..., Any], memory: Path
) -> None:
    source = made()
    source.send_checkpoint([1], 3, state(3), TIMEOUT)
    at = json.loads(source.metadata())
    address, secret = (at["host"], at["port"]), bytes.fromhex(at["secret"])
    with connected(address, secret, 60.0) as link:
        link.send({"step": 3, "begin": 0, "within_s": 60.0})
        nbytes = link.receive()["nbytes"]
        parts = link.receive_parts(nbytes)
        file = bytearray(next(parts))
        source.disallow_checkpoint()  # as at the end of the step
        source.send_checkpoint([1], 4, state(4), TIMEOUT)
        for part in parts:
            file += part
        link.send({})
    path = memory / "got.pt"
    path.write_bytes(file)
    assert_is(fastckpt.load(path), 3)
    path.unlink()


def test_a_step_that_is_over_is_not_served(made: Callable[..., Any]) -> None:
    source, receiver = made(), made()
    source.send_checkpoint([1], 4, state(4), TIMEOUT)
    with pytest.raises(
        PeerFailed, match=r"step 3 .* from replica 6 at .*: it is at step 4"
    ) as told:
        receiver.recv_checkpoint(6, source.metadata(), 3, TIMEOUT)
    assert told.value.ranks == (6,)
    source.disallow_checkpoint()
    with pytest.raises(PeerFailed, match="timed out"):
        receiver.recv_checkpoint(0, source.metadata(), 4, timedelta(milliseconds=10))


def test_a_state_that_cannot_be_stored_is_an_error_of_the_source(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, receiver = made(), made()
    broken = StorageError("write", "/memory/1.pt", 28)

    def refuses(*_how: Any) -> None:
        raise broken

    source.send_checkpoint([1], 1, state(1), TIMEOUT)
    monkeypatch.setattr(source._snapshot, "opened", refuses)
    with pytest.raises(PeerFailed, match="No space left"):
        receiver.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


# ---- sources that die, lie or stall


class liar:  # used like a function
    """A source that behaves as told, of which the state is that of step 3."""

    def __init__(self, behave: Callable[[PeerLink, bytes], None]) -> None:
        self._behave, self._listener = behave, Listener(HOST)
        self.served = 0

    def __enter__(self) -> str:
        secret = os.urandom(32)
        content = content_of(3)

        def serve(link: PeerLink) -> None:
            self.served += 1
            link.limit(time.monotonic() + 60.0)
            link.receive()
            self._behave(link, content)

        self._listener.start(secret, serve)
        host, port = self._listener.address
        return json.dumps({"host": host, "port": port, "secret": secret.hex()})

    def __exit__(self, *_error: object) -> None:
        self._listener.close()


def content_of(step: int) -> bytes:
    path = Path("/dev/shm") / f"fastckpt-test-{os.getpid()}.pt"
    fastckpt.save(state(step), path, options=fastckpt.SaveOptions(durable=False)).result(60)
    try:
        return path.read_bytes()
    finally:
        path.unlink()


def send_whole(link: PeerLink, content: bytes, step: int = 3) -> None:
    link.send({"step": step, "nbytes": len(content)})
    with suppress(OSError):  # the receiver has hung up
        link._send(content)
        link.receive()


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def stalls(link: PeerLink, content: bytes, nbytes: int) -> None:
    link.send({"step": 3, "nbytes": len(content)})
    link._send(content[:nbytes])
    with suppress(OSError):
        link.receive_bytes(1)  # the receiver hangs up at last


def tells(*message: Any) -> Callable[[PeerLink, bytes], None]:
    def behave(link: PeerLink, _content: bytes) -> None:
        for each in message:
            link.send(each)

    return behave


LIARS: dict[str, tuple[Callable[[PeerLink, bytes], None], str]] = {
    **{
        f"flips {at}": (lambda link, its, at=at: send_whole(link, flipped(its, at)), told)
        for at, told in (
            *((52, "no checksums"), (4096, "damaged"), (1 << 20, "damaged"), (9 << 20, "damaged")),
            *((-3000, "damaged"), (-30, "damaged")),
        )
    },
    "ends early": (lambda link, its: send_whole(link, its[:-100]), "damaged|truncated"),
    "sends too much": (lambda link, its: send_whole(link, its + b"\0" * 4096), "damaged|truncated"),
    "sends nothing": (lambda link, _its: send_whole(link, b""), "no checksums"),
    "sends another kind": (lambda link, its: send_whole(link, b"PK" * (len(its) // 2)), "no check"),
    "is of another step": (lambda link, its: send_whole(link, its, 4), "answered something else"),
    "refuses": (tells({"error": "it is ill"}), "it is ill"),
    "claims too much": (tells({"step": 3, "nbytes": 1 << 60}), "has no room for"),
    "claims less than nothing": (tells({"step": 3, "nbytes": -1}), "something else"),
    "claims a text": (tells({"step": 3, "nbytes": "7"}), "something else"),
    "says a list": (lambda link, _its: link._send(b"\2\0\0\0[]"), "does not belong"),
    "says no JSON": (lambda link, _its: link._send(b"\2\0\0\0{["), "does not belong"),
    "hangs up": (lambda link, _its: None, "closed the connection"),
    "stalls at once": (lambda link, _its: stalls(link, b"7", 0), "timed out"),
    "stalls in the first block": (lambda link, its: stalls(link, its, 1000), "timed out"),
    "stalls at the end": (lambda link, its: stalls(link, its, len(its) - 1), "timed out"),
}


@pytest.mark.parametrize("kind", LIARS)
def test_a_source_that_lies_or_stalls_is_named(kind: str, made: Callable[..., Any]) -> None:
    receiver, (behave, told) = made(), LIARS[kind]
    until = time.monotonic() + SHORT.total_seconds() + 30
    with liar(behave) as metadata, pytest.raises(PeerFailed, match=told) as error:
        receiver.recv_checkpoint(2, metadata, 3, SHORT)
    assert f"replica 2 at {HOST}:" in str(error.value) and error.value.ranks == (2,)
    assert time.monotonic() < until


def test_a_broken_connection_goes_on_where_it_broke(made: Callable[..., Any]) -> None:
    begins = list[int]()
    content, secret, listener = content_of(3), os.urandom(32), Listener(HOST)

    def serve(link: PeerLink) -> None:
        link.limit(time.monotonic() + 60.0)
        begin = link.receive()["begin"]
        begins.append(begin)
        link.send({"step": 3, "nbytes": len(content)})
        end = len(content) if len(begins) == 3 else begin + (5 << 20)
        link._send(content[begin:end])
        if end == len(content):
            link.receive()

    listener.start(secret, serve)
    host, port = listener.address
    metadata = json.dumps({"host": host, "port": port, "secret": secret.hex()})
    assert_is(made().recv_checkpoint(0, metadata, 3, TIMEOUT), 3)
    assert begins == [0, 5 << 20, 10 << 20]
    listener.close()


def test_damage_on_the_way_is_fetched_again(made: Callable[..., Any]) -> None:
    times = list[int]()

    def behave(link: PeerLink, content: bytes) -> None:
        times.append(1)
        send_whole(link, flipped(content, 6 << 20) if len(times) == 1 else content)

    with liar(behave) as metadata:
        assert_is(made().recv_checkpoint(0, metadata, 3, TIMEOUT), 3)
    assert len(times) == 2


@pytest.mark.parametrize(
    "metadata",
    ["", "[]", "{}", '{"host": "127.0.0.1", "port": 1, "secret": "00"}', "http://[::]:1"],
)
def test_metadata_of_something_else(metadata: str, made: Callable[..., Any]) -> None:
    with pytest.raises(PeerFailed, match="step 3 could not be received from replica 1"):
        made().recv_checkpoint(1, metadata, 3, SHORT)


def test_a_stranger_gets_nothing(made: Callable[..., Any]) -> None:
    source, receiver = made(), made()
    source.send_checkpoint([1], 3, state(3), TIMEOUT)
    wrong = json.loads(source.metadata()) | {"secret": "00" * 32}
    with pytest.raises(PeerFailed, match=r"closed the connection|prove"):
        receiver.recv_checkpoint(0, json.dumps(wrong), 3, SHORT)


def test_the_fallback_is_of_that_step_or_the_error_is_raised(
    made: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[int]()

    def fallback(step: int) -> Any:
        asked.append(step)
        return state(step) if step == 3 else None

    receiver = made(fallback=fallback)
    with liar(tells({"error": "it is ill"})) as metadata:
        assert_is(receiver.recv_checkpoint(0, metadata, 3, SHORT), 3)
        assert "it is ill; it was taken from the fallback instead" in caplog.text
        with pytest.raises(PeerFailed, match="it is ill"):
            receiver.recv_checkpoint(0, metadata, 4, SHORT)
    assert asked == [3, 4]


# ---- groups that are killed


def test_what_a_killed_source_has_left_goes_with_the_next_transport(
    torchft: ModuleType, memory: Path
) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # as a kill would, it leaves everything behind
        torchft.Transport(address=HOST, directory=memory)
        os.write(write, b"made")
        os._exit(0)
    assert os.read(read, 4) == b"made"
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert len(os.listdir(memory)) == 1
    torchft.Transport(address=HOST, directory=memory).shutdown()
    assert not os.listdir(memory)


@pytest.mark.skipif(not installed("torchft"), reason="torchft is not installed")
def test_torchft_s_own_contract(torchft: ModuleType) -> None:
    from torchft.checkpointing.transport_test import run_multi_recovery_test

    class Contract(unittest.TestCase):
        def runTest(self) -> None:
            run_multi_recovery_test(
                self, lambda _rank, _world: torchft.Transport(address=HOST), torch.device("cpu")
            )

    result = unittest.TextTestRunner().run(Contract())
    assert result.wasSuccessful() and result.testsRun == 1


class Group:
    """A replica group whose process is started again whenever it has failed, as a scheduler does.

    torchft 0.2 itself may end with an AssertionError in the group beside a killed one.

    Attributes:
        digests: those of the committed steps, of all its lives.
        life: those of its last life.
        lives: how often it was started.
    """

    def __init__(self, lighthouse: str, number: int, last: Path, memory: Path) -> None:
        self.digests, self.life = list[tuple[int, str]](), list[tuple[int, str]]()
        self.lives = self._seen = 0
        self._arguments = [lighthouse, f"group{number}", str(last), str(memory)]
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._is_over:
            command = [sys.executable, "-m", "tests.crews.torchft_life", *self._arguments]
            with subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as process:
                self._process, self.life = process, []
                self.lives += 1
                assert process.stdout is not None
                for line in process.stdout:
                    words = line.split()
                    if len(words) == 2 and words[0].isdecimal():
                        self.life.append((int(words[0]), words[1]))
                        self.digests.append(self.life[-1])
            self._is_over = self._is_over or process.returncode == 0

    def wait_for(self, count: int) -> None:
        """Waits until it has committed so many steps since the last call. If all groups end at the
        same time, they begin again at the first step.
        """
        end = self._seen + count
        wait_until(lambda: len(self.digests) >= end, f"{count} steps more are committed", 600)
        self._seen = len(self.digests)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def wait_end(self) -> None:
        self._keeper.join(600)
        assert not self._keeper.is_alive()

    def close(self) -> None:
        self._is_over = True
        self.kill()
        self.wait_end()


@pytest.mark.skipif(not installed("torchft"), reason="torchft is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 3])
def test_a_killed_group_heals_bit_by_bit(
    count: int, memory: Path, disk: Path, storm: Storm
) -> None:
    """Each step of each group has the parameters and the optimizer's state that it has in every
    other group, whichever is killed.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    last, kills = disk / "last", 0
    groups = [Group(lighthouse.address(), number, last, memory) for number in range(count)]
    try:
        for rng in storm.rounds(3, 13):
            for group in groups:
                group.wait_for(rng.randrange(1, 9))
            rng.choice(groups).kill()
            kills += 1
        for group in groups:
            group.wait_for(1)
        end = max(group.digests[-1][0] for group in groups) + 20
        (disk / "last.tmp").write_text(str(end))
        (disk / "last.tmp").rename(last)
        for group in groups:
            group.wait_end()
    finally:
        for group in groups:
            group.close()
        lighthouse.shutdown()
    begin = max(group.life[0][0] for group in groups)  # since then, all groups live
    lives = [step for group in groups for step in group.life if step[0] >= begin]
    assert len({*lives}) == len(dict(lives)) and max(lives)[0] == end
    assert all(group.life[-1][0] == end for group in groups)
    # The mean of two equal gradients is exact and that of three is not, so a step that two groups
    # commit again after a kill may differ from what three have committed.
    steps = {step for group in groups for step in group.digests}
    assert count == 3 or len(steps) == len(dict(steps))
    assert dict(steps).keys() >= {*range(1, end + 1)}
    assert sum(group.lives for group in groups) >= count + kills
    print(f"{kills} kills, {sum(group.lives for group in groups)} lives, {end} steps")
