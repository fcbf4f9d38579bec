"""The comparison of states that should be the same on all ranks: structure, and samples of
contents.

The module describes one rank's state, and finds the tensors and ranks for which the descriptions
differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fastckpt.errors import RanksDisagree
from fastckpt.ranks.round import Round


class Records(Protocol):
    """The part of a Round's interface that publishes records and waits for them."""

    rank: int
    world_size: int
    label: str

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, rank: int = 0) -> bytes: ...
    def gather(self, key: str) -> list[bytes]: ...


class Apart:
    """The records about one of several subjects in a round, with separate keys.

    Args:
        agreement: the round.
        name: the subject's name, which is the same on all ranks.
    """

    def __init__(self, agreement: Records, name: str) -> None:
        self.rank, self.world_size = agreement.rank, agreement.world_size
        self.label = agreement.label
        self._agreement, self._name = agreement, name

    def put(self, key: str, value: bytes) -> None:
        self._agreement.put(f"{key} of {self._name}", value)

    def get(self, key: str, rank: int = 0) -> bytes:
        return self._agreement.get(f"{key} of {self._name}", rank)

    def gather(self, key: str) -> list[bytes]:
        return self._agreement.gather(f"{key} of {self._name}")


def same(
    agreement: Round, key: str, digest: bytes, detail: Callable[[], bytes]
) -> list[tuple[list[int], bytes]] | None:
    """Compares a digest between all ranks. Each rank calls this with the same key and a digest of
    the same length.

    Returns None if all digests are equal. Otherwise returns, on every rank, the ranks with each
    digest and their detail. Only the lowest rank with a digest calls `detail` for it.
    """
    return compared(agreement, key, digest, detail)[0]


def compared(
    agreement: Round, key: str, digest: bytes, detail: Callable[[], bytes], beside: bytes = b""
) -> tuple[list[tuple[list[int], bytes]] | None, int | None]:
    """Returns the result of same(), and a rank whose `beside` bytes differ from rank 0's, or None.
    If there are several such ranks, another round may return another one.
    """
    agreement.put(f"{key}.digest", digest + beside)
    if agreement.rank == 0:
        ranks_of: dict[bytes, list[int]] = {}
        others = list[int]()
        for rank, record in enumerate(agreement.gather(f"{key}.digest")):
            ranks_of.setdefault(record[: len(digest)], []).append(rank)
            others += [rank] if record[len(digest) :] != beside else []
        unequal = [*ranks_of.values()] if len(ranks_of) > 1 else []
        chosen = zlib.crc32(agreement.label.encode()) % max(1, len(others))
        found = [unequal, others[chosen] if others else None]
        agreement.put(f"{key}.unequal", json.dumps(found).encode())
    groups: list[list[int]]
    groups, other = json.loads(agreement.get(f"{key}.unequal"))
    if agreement.rank in [ranks[0] for ranks in groups]:
        agreement.put(f"{key}.detail", detail())
    if agreement.rank == 0:  # copies the details, which their ranks may delete when they close
        for ranks in groups:
            detailed = agreement.get(f"{key}.detail", ranks[0])
            agreement.put(f"{key}.detail of {ranks[0]}", detailed)
    details = [(ranks, agreement.get(f"{key}.detail of {ranks[0]}")) for ranks in groups]
    return details or None, other


log = logging.getLogger("fastckpt")

SAMPLED_BYTES = 64 << 10  # of all tensors together, each save
_RANGE_BYTES = 128  # ranges are few and long, since each from a GPU is a copy of its own
_RANGES_MAX = 4  # of one tensor
_SAMPLED_MAX = SAMPLED_BYTES // _RANGE_BYTES  # tensors
_VALUE_BYTES_MAX = 16 << 20  # of a value aside
_ITEMS_MAX = 1 << 17  # of a container; _STEP of them are made a text at a time
_STEP = 1000
_VALUES_TOLD_MAX = 10
_NAMED_MAX = 3  # differences in one message
_GROUPS_MAX = 4  # of ranks, in one difference


class Sampled(NamedTuple):
    """The memory of a tensor whose contents should be the same on all ranks."""

    name: str
    address: int
    nbytes: int


class Description:
    """A description of one rank's state, for comparison with the other ranks.

    Args:
        texts: the name of every tensor, with a text of its properties that ranks must have in
            common; or a function that returns this list when it is needed.
        first_rank: names of tensors whose contents differed before, so that only the first rank's
            are saved. They may be sampled too, for still_differing().

    Attributes:
        first_rank: these names.
        aside: rank-specific values, by name, of which the first rank's are saved.
        small: a description of samples of tensors among these values, or None.
    """

    def __init__(
        self,
        texts: list[tuple[str, str]] | Callable[[], list[tuple[str, str]]],
        first_rank: Iterable[str] = (),
    ) -> None:
        self._texts = texts
        self._storages: list[tuple[str, str]] = []
        self._samples: list[tuple[str, list[tuple[int, bytearray]]]] = []
        self.first_rank = frozenset(first_rank)
        self._seed = 0
        self.aside: Mapping[str, object] = {}
        self.small: Description | None = None

    def lay_out(self, storages: Iterable[tuple[str, str]]) -> None:
        """Adds storages in the order of writing, each with the name of one of its tensors and a
        text that must be the same on all ranks.
        """
        self._storages += [(f"the storage of {name}", text) for name, text in storages]

    def sample(self, parts: Sequence[Sampled | tuple[str, int, int]], seed: int) -> None:
        """Chooses a few ranges of each part, at most SAMPLED_BYTES in all. Equal seeds choose the
        same ranges on all ranks. If there are too many parts, only some are sampled; another seed
        chooses others.
        """
        self._seed = seed
        stride = max(1, -(-len(parts) // _SAMPLED_MAX))
        chosen = range(seed % stride, len(parts), stride)
        ranges = max(1, min(_RANGES_MAX, _SAMPLED_MAX // max(1, len(chosen))))
        random_offset = random.Random(seed).random
        for number in chosen:
            name, address, nbytes = parts[number]
            length = min(_RANGE_BYTES, nbytes)
            count = ranges if length < nbytes else 1
            offsets = [int(random_offset() * (nbytes - length + 1)) for _ in range(count)]
            taken = [(address + offset, bytearray(length)) for offset in offsets]
            self._samples.append((name, taken))

    def samples(self) -> list[tuple[int, bytearray]]:
        """Returns the chosen ranges: their addresses, and buffers to be filled before the
        comparison.
        """
        own = [part for _, taken in self._samples for part in taken]
        return own if self.small is None else own + self.small.samples()

    def detail(self) -> bytes:
        """Returns the complete description, for disagreement()."""
        return zlib.compress(json.dumps(self._all()).encode(), level=1)

    def digest(self) -> bytes:
        """Returns 32 bytes that are equal if the details are."""
        return hashlib.sha256(repr(self._all()).encode()).digest()

    def still_differing(self) -> Description | None:
        """Returns a description of only the samples in `first_rank`, which digest() leaves out;
        None if there are none.
        """
        apart = Description([])
        apart._samples = [each for each in self._samples if each[0] in self.first_rank]
        return apart if apart._samples else None

    def own_values(self) -> dict[str, int]:
        """Returns a checksum for each rank-specific value, which is equal for equal values."""
        crcs = {name: _crc_of(value) for name, value in self.aside.items()}
        return crcs if self.small is None else crcs | dict(self.small._crcs())

    def _crcs(self) -> list[tuple[str, int]]:
        return [
            (name, zlib.crc32(b"".join(content for _, content in taken)))
            for name, taken in self._samples
            if name not in self.first_rank
        ]

    def _all(self) -> list[Any]:
        if callable(self._texts):
            self._texts = self._texts()
        crcs = self._crcs()
        return [self._texts, crcs, sorted(self.first_rank), self._storages, self._seed]


def compare(
    agreement: Round,
    key: str,
    description: Description,
    path: str,
    differing: Callable[[set[str]], None],
    told: set[str] | None = None,
) -> None:
    """Raises RanksDisagree if ranks call this with different descriptions. If only contents of
    tensors differ, calls `differing` with these tensors' names. `path` is for the message.

    Warns if contents in `first_rank` still differ. Warns also of each rank-specific value that
    differs between ranks, except if its name is in `told`; the name is then added.
    """
    own = description.own_values()
    beside = hashlib.sha256(repr(sorted(own.items())).encode()).digest() if own else b""
    groups, other = compared(agreement, key, description.digest(), description.detail, beside)
    if groups is not None:
        error, unequal = disagreement(groups, path)
        differing(unequal)
        raise error
    if other is not None:
        _tell_own(
            agreement, f"{key} of each rank", own, other, path, set() if told is None else told
        )
    apart = description.still_differing()
    if apart is None:
        return
    groups = same(agreement, f"{key} of the first rank", apart.digest(), apart.detail)
    if groups is not None:
        found = [*_contents(_read(groups)).values()]
        level = logging.DEBUG if agreement.rank else logging.WARNING
        text = "%r is saved with the contents of rank 0, which may not be the right ones: %s%s"
        log.log(level, text, path, "; ".join(found[:_NAMED_MAX]), _more(found))


def _tell_own(
    agreement: Round, key: str, own: dict[str, int], other: int, path: str, told: set[str]
) -> None:
    """On the first rank, warns of values that differ on another rank."""
    if agreement.rank == other:
        agreement.put(key, zlib.compress(json.dumps(own).encode(), level=1))
    if agreement.rank == 0:
        theirs = json.loads(zlib.decompress(agreement.get(key, other)))
        unlike = [name for name, crc in own.items() if theirs.get(name, crc) != crc]
        unlike = [name for name in unlike if name not in told]
        told.update(unlike)
        if unlike:
            more, told_now = len(unlike) - _VALUES_TOLD_MAX, unlike[:_VALUES_TOLD_MAX]
            log.warning(
                "%r is saved with rank 0's values of %s, but rank %d has other values or keys "
                "there: put values that each rank keeps for itself into a fastckpt.PerRank",
                path,
                ", ".join(repr(name) if name else "the whole state" for name in told_now)
                + f" and {more} more" * (more > 0),
                other,
            )


def _crc_of(value: object) -> int:
    """Returns a number that is equal for equal values. Only the beginning of a long value is
    used.
    """
    crc, nbytes = 0, 0
    try:
        for part in _parts(value):
            crc = zlib.crc32(part, crc)
            nbytes += len(part)
            if nbytes >= _VALUE_BYTES_MAX:
                break
    except ValueError:  # an int that has more digits than Python writes: nobody can tell
        pass
    return crc


def _parts(value: Any) -> Iterator[bytes]:
    """Yields bytes of a value. The texts of many items are made in several calls, because a single
    call would block Python's other threads.
    """
    if hasattr(value, "tobytes"):
        yield value.tobytes()[:_VALUE_BYTES_MAX]
        return
    if type(value) is frozenset:  # of keys, of which the beginning would depend on the order
        value = (len(value), *sorted(map(_key_text, value)) * (len(value) <= _ITEMS_MAX))
    if type(value) is not tuple:
        value = (value[:_VALUE_BYTES_MAX] if isinstance(value, str | bytes) else value,)
    for begin in range(0, min(len(value), _ITEMS_MAX), _STEP):
        yield repr(value[begin : begin + _STEP]).encode(errors="replace")


def _key_text(key: object) -> str:
    """Returns a text for a dict's key. If the key's own text may differ between processes, this is
    the name of its type.
    """
    parts = key if type(key) is tuple else (key,)
    is_plain = all(type(each) in (str, bytes, int, float, bool, type(None)) for each in parts)
    return repr(key) if is_plain else type(key).__name__


def disagreement(
    groups: Sequence[tuple[list[int], bytes]], path: str
) -> tuple[RanksDisagree, set[str]]:
    """Returns an error that states where descriptions differ, and the names of the tensors whose
    contents differ.

    Args:
        groups: for each distinct description, the ranks that have it and its detail().
        path: the checkpoint's path, for the message.
    """
    details = _read(groups)
    _, base = details[0]
    texts: list[str] = []
    for ranks, other in details[1:]:
        differences = _structure_differences(dict(base[0]), dict(other[0]), _ranks(ranks))
        texts += differences or _structure_differences(dict(base[3]), dict(other[3]), _ranks(ranks))
        if base[2] != other[2]:
            names = sorted(set(base[2]) ^ set(other[2]))
            texts.append(f"{_ranks(ranks)} missed that {names[0]} differed in an earlier save")
        if base[4] != other[4]:  # another seed sampled other ranges, so their CRCs say nothing
            texts.append(
                f"{_ranks(ranks)} missed an earlier call; from the next call on, all ranks are "
                "in step again"
            )
    unequal = {} if texts else _contents(details)
    texts += unequal.values()
    missed = sum(base[4] != other[4] for _, other in details[1:])
    advice = (
        "from the next save on they are taken from rank 0, whose contents may not be the right "
        "ones: if they should be equal, find out why they differ; if they should differ, put "
        "them into a fastckpt.PerRank and save with a Checkpointer"
        if unequal
        else "every rank must call every save"
        if 0 < missed == len(texts)
        else "every rank must save the same tensors"
    )
    text = "; ".join(texts[:_NAMED_MAX]) or "ranks describe their state differently"
    text += f"{_more(texts)}; nothing was committed: {advice}"
    return RanksDisagree(f"ranks disagree about {path!r}: {text}"), set(unequal)


def _read(groups: Sequence[tuple[list[int], bytes]]) -> list[tuple[list[int], Any]]:
    """Decodes the description of each group of ranks; the first group contains rank 0."""
    ordered = sorted(groups, key=lambda group: min(group[0]))
    return [(ranks, json.loads(zlib.decompress(detail))) for ranks, detail in ordered]


def _contents(details: Sequence[tuple[list[int], Any]]) -> dict[str, str]:
    """Returns, for each tensor whose contents differ between ranks, a text that groups the ranks
    with equal contents.
    """
    ranks_of: dict[str, dict[int, list[int]]] = {}
    for ranks, description in details:
        for name, crc in description[1]:
            ranks_of.setdefault(name, {}).setdefault(crc, []).extend(ranks)
    texts = {}
    for name, ranks_by_crc in ranks_of.items():
        groups = [f"another on {_ranks(ranks)}" for ranks in ranks_by_crc.values()][:_GROUPS_MAX]
        rest = len(ranks_by_crc) - len(groups)
        groups += [f"{rest} more on other ranks"] if rest else []
        if groups[1:]:
            texts[name] = f"the content of {name} differs: {', '.join(groups)}".replace(
                "another", "one", 1
            )
    return texts


def _more(found: Sequence[str]) -> str:
    rest = len(found) - _NAMED_MAX
    return f" (and {rest} more differences)" if rest > 0 else ""


def _structure_differences(base: dict[str, str], other: dict[str, str], ranks: str) -> list[str]:
    texts = [f"{name} is missing on {ranks}" for name in base if name not in other]
    texts += [f"{name} is on {ranks} but not on rank 0" for name in other if name not in base]
    texts += [
        f"{name} is {other[name]} on {ranks} but {text} on rank 0"
        for name, text in base.items()
        if name in other and other[name] != text
    ]
    if not texts and list(base) != list(other):
        texts = [f"the order of the tensors on {ranks} differs from that on rank 0"]
    return texts


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{more}"
