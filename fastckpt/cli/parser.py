"""The arguments of the command line: what each command takes, and what `--help` says of it.

It must import nothing that imports torch, which takes seconds and which `--help` does not need. So
what a command does lies in a module of its own, which is imported when the command is run.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from fastckpt.arguments import quantities
from fastckpt.arguments.checks import check_path
from fastckpt.cli import advise
from fastckpt.cli.shared_arguments import path_argument, quantity_argument

CONVERT_DTYPES = ("fp32", "bf16", "fp16")
_FORMATS = ("pt", "safetensors", "hf", "dcp", "step")
_NEWEST = "of a root, also look for the newest step there"
_MIB = 1 << 20


# Its name or flag, and the rest of what argparse is told.
Argument = tuple[str, dict[str, Any]]
# Its description and its arguments, but for --json, which all take.
Command = tuple[str, str, tuple[Argument, ...]]


def _any(name: str, **options: Any) -> Argument:
    return name, options


def _command(told: str, description: str, *arguments: Argument) -> Command:
    return told, description, arguments


def _path(name: str, metavar: str, told: str, **options: Any) -> Argument:
    options.setdefault("type", path_argument)
    return _any(name, metavar=metavar, help=told, **options)


def _flag(name: str, told: str) -> Argument:
    return _any(name, action="store_true", help=told)


def _directory(told: str, **options: Any) -> Argument:
    return _path("directory", "DIR", told, nargs="?", default=".", **options)


def _local(what: str) -> Argument:
    """Returns --local, which means the same to every command that has it."""
    told = (
        "this node's local tier, as given to Checkpointer(local=DIR), where files that only other "
        f"nodes have may be missing: {what}; may be given several times"
    )
    return _path("--local", "DIR", told, action="append", default=[])


def _positive(text: str) -> int:
    """Returns a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _size(text: str) -> int:
    nbytes = int(quantities.size(text))
    if nbytes < _MIB:
        raise quantities.NotAQuantity(f"{text!r} is less than 1MiB")
    return nbytes


def _block(text: str) -> int:
    return max(1, round(quantities.size(text) / _MIB)) * _MIB


def _count(name: str, what: str, default: int) -> Argument:
    told = f"{what}; default: {default}"
    return _any(name, type=_positive, default=default, metavar="N", help=told)


_GLOB = _any("--glob", default="*", help='only names like this, such as "*.weight"')
_COMMANDS = {
    "ls": _command(
        "list the steps under a root",
        "Lists the steps of a Checkpointer's root, the one committed last first: size, age, "
        "ranks, metrics and pins, and whether all their files are there with the right sizes "
        "(`verify` reads them, too). The exit status is 0, or 1 if a step is damaged or there is "
        "nothing.",
        _path("root", "ROOT", "a Checkpointer's root"),
        _local("also list what it has of ROOT"),
    ),
    "inspect": _command(
        "list the tensors of a checkpoint",
        "Lists the tensors of a checkpoint by name, with dtype, shape, size and files, and reads "
        "none of them. Nothing of the checkpoint is run. The exit status is 0, or 1 if PATH is "
        "missing, damaged or no checkpoint.",
        _path(
            "path",
            "PATH",
            "a file of fastckpt.save, torch.save or safetensors, a step or a Checkpointer's root "
            "(its newest step that is whole; what is passed over is told), or a directory of "
            "DCP, Megatron or Hugging Face",
        ),
        _GLOB,
        _local(_NEWEST),
    ),
    "diff": _command(
        "compare the tensors of two checkpoints",
        "Compares two checkpoints of any kind: names, dtypes, shapes and contents of their "
        'tensors, and nothing else. Names with "/" between keys fit those of safetensors and '
        'DCP, which have ".". Nothing of them is run. The exit status is 0 if the tensors are '
        "equal, and 1 if they differ, or one is missing, damaged or no checkpoint.",
        _path("a", "A", "as inspect's PATH"),
        _path("b", "B", "as inspect's PATH"),
        _GLOB,
        _local(_NEWEST),
    ),
    "convert": _command(
        "copy the tensors of a checkpoint into another format",
        "Copies the tensors of a checkpoint of any kind, bit by bit unless --dtype is given, and "
        "nothing else of it: no steps, no objects; it says what was left out. Nothing of SRC is "
        "run. What is verified when read is verified. DST appears when it is whole and durable, "
        "or not at all. The exit status is 0, or 1 if something could not be done.",
        _path("source", "SRC", "as inspect's PATH"),
        _path("target", "DST", "the path to make, which must not exist (a root of steps may)"),
        _any(
            "--to",
            required=True,
            choices=_FORMATS,
            help='"pt": a file for torch.load; "safetensors": one file; "hf": a directory of '
            'safetensors files with an index, as Hugging Face has; "dcp": a directory of '
            'torch.distributed.checkpoint; "step": a step of a Checkpointer, whose root is DST. '
            "The first, fourth and fifth pass through an unnamed file of the size of the tensors "
            "beside DST",
        ),
        _any("--glob", default="*", help="only tensors of such names, as inspect has"),
        _any(
            "--prefix",
            default="",
            help="only tensors whose name begins with this, which is taken off; for safetensors "
            'and hf names have "." between keys ("model."), else they are those that inspect '
            'lists ("model/")',
        ),
        _any(
            "--rename",
            default="{}",
            metavar="DICT",
            help="other names, by the dict of patterns that load_into takes in Python: "
            '\'{"^model/": ""}\'; --glob and --prefix then go by the new names',
        ),
        _any(
            "--dtype",
            choices=CONVERT_DTYPES,
            help="convert tensors of floating-point numbers to this dtype",
        ),
        _any("--shard-size", default="5GB", metavar="SIZE", help="of hf's files, default: 5GB"),
        _any("--step", type=int, help="the number of the step; default: that of SRC, or 0"),
        _local(_NEWEST),
    ),
    "verify": _command(
        "read checkpoints and compare all checksums",
        "Reads every byte under each PATH and compares checksums. The exit status is 0 if all is "
        "as it was written; 1 if something is damaged or missing, or a PATH holds no checkpoint; "
        "3 if none of that was found, but something could not be read in several attempts; 4 if "
        "the rest is as it was written, but something has no checksums (stock files of torch or "
        'safetensors), is told as "unchecked", and may be damaged or not.',
        _path(
            "paths",
            "PATH",
            "a file of fastckpt.save, a step, a Checkpointer's root with what lies beside its "
            "steps, a .distcp file, a checkpoint of DCP, Transformers or Accelerate, an export, "
            "or a directory of such",
            nargs="*",
        ),
        _local("also read what it has of each PATH, or without a PATH all that it has"),
    ),
    "repair": _command(
        "list, and remove, what dead saves left behind",
        "Lists what saves left in a directory that were killed: temporary files and directories, "
        "steps that were never committed, and data files that no .metadata of DCP names. With "
        "--yes it removes what is surely dead: what a process of this host left that is gone. "
        "Committed checkpoints, damaged ones too, and what a live process has locked or is known "
        "to be writing stay. The exit status is 0 if nothing is left, else 1.",
        _path(
            "directory",
            "DIR",
            "a Checkpointer's root, or a directory that checkpoints are saved to",
        ),
        _flag("--yes", "remove what is surely dead"),
        _flag(
            "--other-hosts",
            "with --yes, also remove what processes of other hosts left (each node of a cluster "
            "is one), and data files of DCP, which do not say whose they are. Whether these are "
            "dead only you can know, by their age, which is shown, unless another node's lock is "
            "seen here: first see to it that no job is saving to DIR",
        ),
        _flag(
            "--takeover",
            "leave the root to the job that saves there next, although another one seems to "
            "live, as after a crash of its host; if it does live, its next save fails with "
            "RootInUse",
        ),
        _local("also list, and remove, what saves left there on their way to DIR"),
    ),
    "report": _command(
        "tell from a log why saves were slow",
        "Prints a line for each save in the log that Checkpointer(log=True) keeps, or with "
        "--step how long each phase of one save took, and on which rank. The exit status is 0, "
        "or 1 if there is no log, no such step, or the log is damaged.",
        _path("log", "LOG", "the log, or its root"),
        _any("--step", type=int, help="only this step, in detail: its last save"),
        _any(
            "--limit",
            type=quantity_argument(quantities.rate),
            metavar="RATE",
            help="what the storage can take, such as 2.5GB/s, of which the share is shown that "
            "saves reached; default: the rate of the fastest save in the log",
        ),
    ),
    "doctor": _command(
        "show what fastckpt does on this machine and in a directory, and why",
        "Shows file system, backend, O_DIRECT, staging memory and GPU libraries, with the "
        "reasons. Writes one page to a file in DIR, and removes it. The exit status is 0 if "
        "saves to DIR would work, 1 if not, or if --gpu is given and torch finds no GPU.",
        _directory("default: ."),
        _flag("--gpu", "use the GPU to find out more; else it stays untouched"),
    ),
}

_MEASURED = (
    " All that is written to DIR is removed again. The exit status is 0; 1 if it could not be "
    "measured, or if bytes came back other than they were written; 130 if it was interrupted."
)
_ON = _directory(
    "on the file system that is measured; default: .", type=partial(path_argument, check=check_path)
)
_DEVICE = _any(
    "--device", choices=("cpu", "cuda"), help="where the state lies; default: a GPU if there is one"
)


def _sized(size: str, rounds: int) -> tuple[Argument, Argument]:
    told = f"default: {size}"
    as_size = _any("--size", type=quantity_argument(_size), default=size, help=told)
    return as_size, _any("--rounds", type=_positive, default=rounds, help=f"default: {rounds}")


_WHATS = {
    "io": _command(
        "the engine's writes and reads beside fio's",
        "Writes and reads one file with fastckpt's engine, which also copies and checksums each "
        "block, by backend, block size and queue depth (threads: as many threads), each in turn "
        "with fio if it is on PATH: io_uring, O_DIRECT, room allocated before, an fsync at the "
        "end. Bytes are compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 3),
        _flag("--quick", "measure few cells"),
        _any(
            "--blocks",
            nargs="+",
            type=quantity_argument(_block),
            metavar="SIZE",
            help="block sizes; default: 1MiB to 16MiB",
        ),
        _any(
            "--depths",
            nargs="+",
            type=_positive,
            metavar="N",
            help="queue depths; default: 1 to 32",
        ),
    ),
    "save": _command(
        "fastckpt.save beside torch.save and safetensors",
        "Saves a random state with each, in turn, and times two things: when the call returns "
        "(with the step fence, the next step() of an optimizer may wait for copies; `train` "
        "counts that), and when the bytes are durable, an fsync included. What was saved is "
        "loaded, by torch.load or safetensors, and compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
    ),
    "load": _command(
        "fastckpt.load beside torch.load and safetensors",
        "Loads a random state from a file that each has written, in turn, with the file dropped "
        "from the page cache before (if some of it stays, the caches of the whole machine are "
        "dropped where that is allowed). Memory that was only mapped is read before the clock "
        "stops. What was loaded is compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
        _flag("--warm", "also load from the page cache"),
    ),
    "train": _command(
        "what saves cost a training loop",
        "Trains a small model without saves, with torch.save and fsync, and with fastckpt.save "
        "in the background, in turn. The clock of each stops when its last save is durable, so "
        "that no write is left out." + _MEASURED,
        _ON,
        *_sized("256MiB", 3),
        _DEVICE,
        _count("--every", "steps from save to save", 10),
        _count("--saves", "a round", 3),
    ),
}


def _add(parsers: Any, commands: dict[str, Command]) -> None:
    for name, (told, description, arguments) in commands.items():
        parser = parsers.add_parser(name, help=told, description=description)
        for flag, options in arguments:
            parser.add_argument(flag, **options)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        # Lets it refuse arguments that it has looked at as argparse does, with status 2.
        parser.set_defaults(error=parser.error)


def make_parser(version: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `command` of what it returns is a module's name."""
    parser = argparse.ArgumentParser(
        prog="fastckpt", description="Asynchronous, durable checkpoints for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fastckpt {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add(commands, _COMMANDS)
    advise.add_arguments(commands)
    bench = commands.add_parser(
        "bench",
        help="measure saves, loads and transfers here, beside torch, safetensors and fio",
        description="Measures on this machine and in a directory. `fastckpt bench WHAT --help` "
        "says how each is measured." + _MEASURED,
    )
    _add(bench.add_subparsers(dest="what", metavar="WHAT", required=True), _WHATS)
    return parser
