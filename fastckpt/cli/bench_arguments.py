"""The arguments of `fastckpt bench`, and what `--help` says of each measurement.

As fastckpt/cli/parser.py, it must import nothing that imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from fastckpt.arguments import quantities
from fastckpt.cli.shared_arguments import add_json, path_argument, quantity_argument

_SIZE_MIN, _MIB = 1 << 20, 1 << 20
_STATUS = (
    " All that is written to DIR is removed again. The exit status is 0; 1 if it could not be "
    "measured, or if bytes came back other than they were written; 130 if it was interrupted."
)


class What(NamedTuple):
    """One WHAT of `fastckpt bench`, as argparse needs it.

    Attributes:
        help, description: for argparse.
        size, rounds: the defaults, as an argument has them.
        on_devices: whether the state may lie on a GPU.
        add_arguments: adds further arguments.
    """

    help: str
    description: str
    size: str
    rounds: int
    on_devices: bool
    add_arguments: Callable[[argparse.ArgumentParser], object]


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure saves, loads and transfers here, beside torch, safetensors and fio",
        description="Measures on this machine and in a directory. `fastckpt bench WHAT --help` "
        "says how each is measured." + _STATUS,
    )
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, its in WHATS.items():
        what = whats.add_parser(name, help=its.help, description=its.description + _STATUS)
        told = "on the file system that is measured; default: ."
        what.add_argument(
            "directory", nargs="?", default=".", type=path_argument, metavar="DIR", help=told
        )
        for flag, read, default in (
            ("--size", quantity_argument(_size), its.size),
            ("--rounds", _positive, its.rounds),
        ):
            what.add_argument(flag, type=read, default=default, help=f"default: {default}")
        if its.on_devices:
            told = "where the state lies; default: a GPU if there is one"
            what.add_argument("--device", choices=("cpu", "cuda"), help=told)
        its.add_arguments(what)
        add_json(what)


def _size(text: str) -> int:
    nbytes = int(quantities.size(text))
    if nbytes < _SIZE_MIN:
        raise quantities.NotAQuantity(f"{text!r} is less than 1MiB")
    return nbytes


def _block(text: str) -> int:
    return max(1, round(quantities.size(text) / _MIB)) * _MIB


def _positive(text: str) -> int:
    """Returns a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _of_io(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="measure few cells")
    for flag, read, metavar, told in (
        ("--blocks", quantity_argument(_block), "SIZE", "block sizes; default: 1MiB to 16MiB"),
        ("--depths", _positive, "N", "queue depths; default: 1 to 32"),
    ):
        parser.add_argument(flag, nargs="+", type=read, metavar=metavar, help=told)
    parser.add_argument(
        "--png", type=path_argument, metavar="FILE", help="draw heat maps, with matplotlib"
    )


def _of_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warm", action="store_true", help="also load from the page cache")


def _of_train(parser: argparse.ArgumentParser) -> None:
    for flag, count, what in (
        ("--every", 10, "steps from save to save"),
        ("--saves", 3, "a round"),
    ):
        told = f"{what}; default: {count}"
        parser.add_argument(flag, type=_positive, default=count, metavar="N", help=told)


WHATS = {
    "io": What(
        help="the engine's writes and reads beside fio's",
        description="Writes and reads one file with fastckpt's engine, which also copies and "
        "checksums each block, by backend, block size and queue depth (threads: as many threads), "
        "each in turn with fio if it is on PATH: io_uring, O_DIRECT, room allocated before, an "
        "fsync at the end. Bytes are compared.",
        size="512MiB",
        rounds=3,
        on_devices=False,
        add_arguments=_of_io,
    ),
    "save": What(
        help="fastckpt.save beside torch.save and safetensors",
        description="Saves a random state with each, in turn, and times two things: when the call "
        "returns (with the step fence, the next step() of an optimizer may wait for copies; "
        "`train` counts that), and when the bytes are durable, an fsync included. What was saved "
        "is loaded, by torch.load or safetensors, and compared.",
        size="512MiB",
        rounds=5,
        on_devices=True,
        add_arguments=lambda _parser: None,
    ),
    "load": What(
        help="fastckpt.load beside torch.load and safetensors",
        description="Loads a random state from a file that each has written, in turn, with the "
        "file dropped from the page cache before (if some of it stays, the caches of the whole "
        "machine are dropped where that is allowed). Memory that was only mapped is read before "
        "the clock stops. What was loaded is compared.",
        size="512MiB",
        rounds=5,
        on_devices=True,
        add_arguments=_of_load,
    ),
    "train": What(
        help="what saves cost a training loop",
        description="Trains a small model without saves, with torch.save and fsync, and with "
        "fastckpt.save in the background, in turn. The clock of each stops when its last save is "
        "durable, so that no write is left out.",
        size="256MiB",
        rounds=3,
        on_devices=True,
        add_arguments=_of_train,
    ),
}
