"""Promise: neighbours take and give what the manifest names, whole, and nothing to strangers.

Nodes of one rank each live in this process; whole jobs are test_ranks_memory.py's business.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from fastckpt import Checkpointer, Memory, StorageError
from fastckpt.formats.manifest import Manifest
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.formats.step_names import SPARES
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.peer_link import _UNPROVEN_MAX, PART_BYTES, PeerLink, connected
from fastckpt.saving.pipeline import current
from fastckpt.saving.ring import Ring
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.posix import PosixSteps
from fastckpt.storage.file_system import Storage
from fastckpt.tiers.nodes import RanksByNode
from fastckpt.tiers.peers import Peers
from tests.kit.noise import flip
from tests.kit.saves import wait_until
from tests.kit.steps import directories, state

SECRET = "ab" * 32
NAME = "step-00000003"


class Node:
    """A node of one rank, and what it has of the step.

    Args:
        rank: its number.
        root: its directory of steps.
    """

    def __init__(
        self, rank: int, root: Path, timeout_s: float = 30.0, memory: Memory | None = None
    ) -> None:
        self.path = root / NAME
        self.steps = PosixSteps(Storage(), str(root))
        self.ring = Ring(self.steps.storage, str(root), SPARES)
        self.peers = Peers(memory or Memory(), self.steps, self.ring, rank, "127.0.0.1", timeout_s)

    @property
    def manifest(self) -> Manifest:
        return self.steps.read(NAME)

    def send(self) -> str:
        return self.peers.send(NAME, self.manifest, self.manifest.sizes)

    def fetch(self, file: str, holders: list[int]) -> str:
        (item,) = self.steps.committed()[0]
        return self.peers.fetch(item, holders, file, False)


def joined(*nodes: Node, groups: str = "") -> None:
    """They learn of each other."""
    told = [
        (*node.peers.address, group)
        for node, group in zip(nodes, groups or "abcdefgh", strict=False)
    ]
    for node in nodes:
        node.peers.begin(RanksByNode([*range(len(nodes))]), told, SECRET)


@pytest.fixture
def pair(disk: Path) -> Iterator[tuple[Node, Node]]:
    """Of two nodes the first has a step, of which the second has the manifest alone."""
    with Checkpointer(disk / "a") as checkpointer:
        checkpointer.save(3, state(3))
    a, b = Node(0, disk / "a", 3.0), Node(1, disk / "b", 3.0)
    joined(a, b)
    assert b.peers.adopt(3, a.manifest.nonce, [0]) == NAME
    yield a, b
    for node in (a, b):
        node.peers.close()


def test_a_neighbour_gets_the_files(pair: tuple[Node, Node]) -> None:
    a, b = pair
    assert a.send() == ""
    assert directories(b.path) == directories(a.path)
    for path in a.path.iterdir():
        assert (b.path / path.name).read_bytes() == path.read_bytes()
    assert a.send() == "", "what is there is not sent again"
    (b.path / "objects.pt").unlink()
    assert b.fetch("objects.pt", [0]) == f"127.0.0.1:{a.path}/objects.pt"
    assert b.fetch("objects.pt", [0]) == f"{b.path}/objects.pt", "another rank has fetched it"


def test_nothing_is_fetched_into_memory_that_was_removed(pair: tuple[Node, Node]) -> None:
    """So who restores reads the next copy, such as the root's."""
    _a, b = pair
    (item,) = b.steps.committed()[0]
    shutil.rmtree(b.path)
    for file in item.manifest.sizes:
        assert b.peers.fetch(item, [0], file, False) == ""


def test_ranks_of_a_node_fetch_different_shards_at_the_same_time(
    pair: tuple[Node, Node],
) -> None:
    _a, b = pair
    (writer,) = b.manifest.writers
    assert b.fetch(writer.index, [0])
    with (b.path / writer.index).open("rb") as index:
        fcntl.flock(index, fcntl.LOCK_EX)  # as another rank that fetches this shard
        fetching = threading.Thread(target=b.fetch, args=(writer.file, [0]))
        fetching.start()
        assert b.fetch("objects.pt", [0])
        assert fetching.is_alive() and writer.file not in directories(b.path)
    fetching.join()
    assert (b.path / writer.file).is_file()


def test_what_comes_is_written_to_the_file_of_a_removed_step(
    pair: tuple[Node, Node], disk: Path
) -> None:
    """Unless somebody still reads that, who then goes on seeing what it held."""
    a, b = pair
    assert a.send() == ""
    for reads in (False, True):
        shard = b.path / "rank-00000.safetensors"
        number, held = shard.stat().st_ino, shard.read_bytes()
        flip(shard, 0.5)
        b.steps.keep_files = b.ring.keep
        with shard.open("rb") if reads else nullcontext() as reader:
            damaged = shard.read_bytes()
            assert b.steps.remove(NAME, b.manifest.nonce)
            assert b.peers.adopt(3, a.manifest.nonce, [0]) == NAME
            assert a.send() == ""
            assert reader is None or reader.read() == damaged
        assert (shard.stat().st_ino == number) == (not reads)
        assert shard.read_bytes() == held
    b.ring.close()


@pytest.mark.parametrize("file", ["rank-00000.json", "rank-00000.safetensors", "objects.pt"])
def test_who_lies_is_named_and_not_believed(
    pair: tuple[Node, Node], file: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    flip(a.path / file, 0.5)
    told = a.send()
    assert told.startswith("sending to rank 1 at 127.0.0.1:") and "CorruptCheckpoint" in told
    assert b.fetch(file, [0]) == ""
    assert "could not be fetched from rank 0 at 127.0.0.1" in caplog.text
    assert file not in os.listdir(b.path)
    assert not [name for name in os.listdir(b.path) if name.endswith(".tmp")]


def test_a_stranger_gets_nothing(pair: tuple[Node, Node]) -> None:
    a, b = pair
    with pytest.raises(OSError), connected(b.peers.address, os.urandom(32), 3.0):
        raise AssertionError("let in")
    with socket.create_connection(b.peers.address, 3.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 16)
        got = b""
        while piece := _received(stranger):
            got += piece
        assert len(got) <= 32, "no more than a challenge"
    link_secret = bytes.fromhex(SECRET)
    with connected(b.peers.address, link_secret, 3.0) as link:
        for asked in (
            {"get": "../../../etc/passwd", "nonce": a.manifest.nonce},
            {"put": "../x", "nonce": a.manifest.nonce},
            {"get": "objects.pt", "nonce": "00" * 16},
            {},
        ):
            link.send(asked)
            assert "CheckpointError" in link.receive()["error"]


def test_strangers_take_no_place_of_the_ranks(pair: tuple[Node, Node]) -> None:
    """However many say nothing, the neighbour is served, and few of them are kept."""
    a, b = pair
    with ExitStack() as strangers:
        peers = [
            strangers.enter_context(socket.create_connection(b.peers.address, 3.0))
            for _ in range(3 * _UNPROVEN_MAX)
        ]
        assert a.send() == ""
        assert len(b.peers._listener._unproven) <= _UNPROVEN_MAX
        while _received(peers[0]):
            pass  # its challenge, and then the end
    assert directories(b.path) == directories(a.path)


def _received(peer: socket.socket) -> bytes:
    try:
        return peer.recv(4096)
    except ConnectionResetError:
        return b""


def test_who_hangs_is_passed_over(
    pair: tuple[Node, Node], disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, _b = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung, c = Node(0, disk / "a", 0.9), Node(1, disk / "b", 0.9)
        port = silent.getsockname()[:2]
        told = [(*hung.peers.address, "x"), (*port, "y")]
        hung.peers.begin(RanksByNode([0, 1]), told, SECRET)
        assert "rank 1 at 127.0.0.1" in hung.send()
        assert "did not answer an earlier request" in hung.send(), "it is not tried again at once"
        told = [(*port, "x"), (*c.peers.address, "y"), (*a.peers.address, "z")]
        c.peers.begin(RanksByNode([0, 1, 2]), told, SECRET)
        assert c.fetch("objects.pt", [0, 2]).endswith(f"/a/{NAME}/objects.pt")
        assert "could not be fetched from rank 0" in caplog.text
        for node in (hung, c):
            node.peers.close()


@pytest.mark.parametrize("trouble", ["refused", "gone there", "no room here"])
def test_what_could_not_be_fetched_may_be_whole(
    pair: tuple[Node, Node], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that is an error which names the step and the neighbour: only bytes tell of damage."""
    a, b = pair
    real = Storage.allocate

    def allocate(storage: Storage, fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "planted")

    if trouble == "refused":
        a.peers.close()
    elif trouble == "gone there":
        shutil.rmtree(a.path)
    else:
        monkeypatch.setattr(Storage, "allocate", allocate)
    for file in ("objects.pt", "rank-00000.safetensors"):
        with pytest.raises(
            StorageError, match=r"step 3 could not be fetched from rank 0 at 127\.0\.0\.1"
        ):
            b.fetch(file, [0])
    if trouble == "no room here":
        monkeypatch.setattr(Storage, "allocate", real)
        assert b.fetch("rank-00000.safetensors", [0]), "its index as well"


def test_a_step_stays_until_who_was_sent_a_file_has_it(pair: tuple[Node, Node]) -> None:
    a, _b = pair
    nonce = a.manifest.nonce
    with connected(a.peers.address, bytes.fromhex(SECRET), 30.0) as link:
        link.send({"get": "objects.pt", "nonce": nonce})
        nbytes = link.receive()["nbytes"]
        assert link.receive_bytes(nbytes) == (a.path / "objects.pt").read_bytes()
        assert not a.steps.remove(NAME, nonce)
        link.send({})
        wait_until(lambda: a.steps.remove(NAME, nonce))


def test_a_file_is_sent_when_the_other_side_says_so(disk: Path) -> None:
    """Until then the kernel sends what is in the file, whatever comes to be there."""
    path, sent = disk / "file", threading.Event()
    path.write_bytes(bytes(4096))
    ours, theirs = socket.socketpair()
    with ours, theirs, path.open("rb") as file:
        sender, receiver = (PeerLink.__new__(PeerLink) for _ in range(2))
        for link, its in ((sender, ours), (receiver, theirs)):
            link._socket, link._until = its, time.monotonic() + 30.0

        def send() -> None:
            assert sender.send_file(file.fileno(), 4096) == {"answer": 1}
            sent.set()

        sending = threading.Thread(target=send)
        sending.start()
        assert receiver.receive_bytes(4096) == bytes(4096)
        assert not sent.is_set()
        receiver.send({"answer": 1})
        sending.join()
        assert sent.is_set()


def test_a_rate_at_which_nothing_arrives_in_time_is_told(
    pair: tuple[Node, Node], disk: Path
) -> None:
    """Before a byte is sent."""
    slow, b = Node(0, disk / "a", 3.0, Memory(rate="10KB/s")), pair[1]
    joined(slow, b)
    told = slow.send()
    assert "s at Memory(rate='10KB/s'), but may take only a third of timeout_s, 1 s" in told, told
    assert "objects.pt" not in directories(b.path)
    slow.peers.close()


def test_who_stops_in_the_midst_of_a_file_is_not_waited_for() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as ours,
        listening.accept()[0] as theirs,
    ):
        link = PeerLink(ours, time.monotonic() + 0.2)
        theirs.sendall(b"x" * 1000)
        with pytest.raises(TimeoutError):
            [*link.receive_parts(PART_BYTES + 1)]
        link.limit(time.monotonic() + 60.0)
        theirs.sendall(b"y" * 1000)
        theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionResetError):
            [*link.receive_parts(PART_BYTES + 1)]


@pytest.mark.parametrize("host", ["\0", "\ud800", "host name", "192.0.2.1"], ids=ascii)
def test_an_address_that_is_none_of_this_node_is_named(host: str, disk: Path) -> None:
    steps = PosixSteps(Storage(), str(disk))
    with pytest.raises(ValueError, match=r"^cannot listen at .*: pass Memory\(address="):
        Peers(Memory(), steps, Ring(steps.storage, str(disk), SPARES), 0, host, 3.0)


def test_copies_go_to_the_next_nodes_of_other_groups(disk: Path) -> None:
    nodes = [Node(rank, disk / str(rank)) for rank in range(4)]
    joined(*nodes, groups="aabb")
    one = nodes[0].peers
    assert [one.neighbours(rank) for rank in range(4)] == [[2], [3], [0], [1]]
    assert [one.sources(rank) for rank in range(4)] == [[2], [3], [0], [1]]
    for node in nodes:
        node.peers.close()


def test_nothing_is_left_when_it_ends(disk: Path) -> None:
    before = {*threading.enumerate()}
    fds = len(os.listdir("/proc/self/fd"))
    node = Node(0, disk / "a")
    joined(node, node)
    silent = socket.create_connection(node.peers.address)
    node.peers.close()
    silent.close()
    wait_until(lambda: {*threading.enumerate()} <= before)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == fds)


def shard(file: str) -> tuple[ShardIndex, str]:
    """The index of a shard, as much of it as a fetch needs, and what belongs to it."""
    return ShardIndex("ab" * 8, 0, file, 0, 0, BLOCK_BYTES, (), None, (), (), None), file


def test_missing_shards_are_fetched_two_at_a_time(disk: Path) -> None:
    """The next copy of a shard is read if it could not be fetched."""
    met, root = threading.Barrier(2, timeout=60), str(disk / "root")

    def fetch(file: str, is_damaged: bool) -> str:
        met.wait()
        if file == "1":
            raise StorageError("fetch", file, errno.ETIMEDOUT)
        (disk / file).touch()
        return f"neighbour:{file}"

    copies = StepCopies(Storage(), current().staging, [str(disk), root], fetch=fetch)
    with copies.ahead(map(shard, "0123")) as shards:
        for index, file in shards:
            assert copies.whole(index.file, lambda file=file: file) == file
    assert copies.sources == {file: f"neighbour:{file}" for file in "023"} | {"1": f"{root}/1"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_only_an_interrupt_does_not_wait_for_fetches(
    disk: Path, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """What a fetch that nobody asked for has met is logged."""
    hung, released, over = threading.Event(), threading.Event(), threading.Event()

    def fetch(file: str, is_damaged: bool) -> str:
        if file == "0":
            return "neighbour"
        hung.set()
        assert released.wait(60)
        over.set()
        raise StorageError("fetch", file, errno.ETIMEDOUT)

    copies = StepCopies(Storage(), current().staging, [str(disk), "root"], fetch=fetch)
    with pytest.raises(kind), copies.ahead(map(shard, "01")) as shards:
        copies.whole(next(shards)[0].file, lambda: None)
        assert hung.wait(60)
        if kind is ValueError:
            released.set()
        raise kind
    assert over.is_set() == (kind is ValueError)
    assert ("ETIMEDOUT" in caplog.text) == (kind is ValueError)
    released.set()
    assert over.wait(60)
