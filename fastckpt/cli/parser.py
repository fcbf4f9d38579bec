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
_NEWEST = "if the path is a root, also look for its newest step there"
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
    text = (
        "this node's local tier, as passed to Checkpointer(local=DIR), which may lack files that "
        f"only other nodes hold: {what}; may be given several times"
    )
    return _path("--local", "DIR", text, action="append", default=[])


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
    text = f"{what}; default: {default}"
    return _any(name, type=_positive, default=default, metavar="N", help=text)


_GLOB = _any("--glob", default="*", help='only names that match this glob, such as "*.weight"')
_COMMANDS = {
    "ls": _command(
        "list the steps under a root",
        "Lists the steps of a Checkpointer's root, the one committed last first: size, age, "
        "ranks, metrics and pins, and whether all their files are there with the right sizes "
        "(`verify` also reads them). The exit status is 0, or 1 if a step is damaged or there is "
        "none.",
        _path("root", "ROOT", "a Checkpointer's root"),
        _local("also list its steps of ROOT"),
    ),
    "inspect": _command(
        "list the tensors of a checkpoint",
        "Lists the tensors of a checkpoint by name, with dtype, shape, size and files, without "
        "reading their data. No code of the checkpoint is run. The exit status is 0, or 1 if "
        "PATH is missing, damaged or not a checkpoint.",
        _path(
            "path",
            "PATH",
            "a file of fastckpt.save, torch.save or safetensors, a step or a Checkpointer's root "
            "(its newest complete step; skipped steps are reported), or a directory of DCP, "
            "Megatron or Hugging Face",
        ),
        _GLOB,
        _local(_NEWEST),
    ),
    "diff": _command(
        "compare the tensors of two checkpoints",
        "Compares two checkpoints of any kind: names, dtypes, shapes and contents of their "
        'tensors, and nothing else. Names with "/" between keys match names of safetensors and '
        'DCP, which use ".". No code of the checkpoints is run. The exit status is 0 if the '
        "tensors are equal, and 1 if they differ, or if a path is missing, damaged or not a "
        "checkpoint.",
        _path("a", "A", "like PATH of inspect"),
        _path("b", "B", "like PATH of inspect"),
        _GLOB,
        _local(_NEWEST),
    ),
    "convert": _command(
        "copy the tensors of a checkpoint into another format",
        "Copies the tensors of a checkpoint of any kind, bit by bit unless --dtype is given, and "
        "nothing else; it lists what it leaves out. No code of SRC is run. Data with checksums "
        "is verified. DST appears only when it is complete and durable. The exit status is 0, or "
        "1 if the copy failed.",
        _path("source", "SRC", "like PATH of inspect"),
        _path(
            "target",
            "DST",
            "the path to create, which must not exist (a root of steps may exist)",
        ),
        _any(
            "--to",
            required=True,
            choices=_FORMATS,
            help=(
                '"pt": a file for torch.load; "safetensors": one file; "hf": a directory of '
                'safetensors files with an index, as Hugging Face has; "dcp": a directory of '
                'torch.distributed.checkpoint; "step": a step of a Checkpointer, whose root is '
                'DST. "pt", "dcp" and "step" need room beside DST for an unnamed temporary file '
                "of the size of the tensors"
            ),
        ),
        _any("--glob", default="*", help="only tensors whose names in inspect match this glob"),
        _any(
            "--prefix",
            default="",
            help=(
                "only tensors whose names begin with this prefix, which is removed; for "
                'safetensors and hf, names have "." between keys ("model."); otherwise they are '
                'the names that inspect lists ("model/")'
            ),
        ),
        _any(
            "--rename",
            default="{}",
            metavar="DICT",
            help=(
                "new names, as the dict of patterns that load_into(rename=) takes in Python: "
                '\'{"^model/": ""}\'; --glob and --prefix then apply to the new names'
            ),
        ),
        _any(
            "--dtype",
            choices=CONVERT_DTYPES,
            help="convert tensors of floating-point numbers to this dtype",
        ),
        _any(
            "--shard-size",
            default="5GB",
            metavar="SIZE",
            help="largest size of hf's files; default: 5GB",
        ),
        _any("--step", type=int, help="the number of the step; default: that of SRC, or 0"),
        _local(_NEWEST),
    ),
    "verify": _command(
        "read checkpoints and compare all checksums",
        "Reads every byte under each PATH and compares checksums. The exit status is 0 if "
        "everything is as it was written; 1 if something is damaged or missing, or a PATH holds "
        "no checkpoint; 3 if no damage was found, but something could not be read in several "
        "attempts; 4 if the rest is as it was written, but something has no checksums (stock "
        'files of torch or safetensors): it is listed as "unchecked", and may be damaged.',
        _path(
            "paths",
            "PATH",
            "a file of fastckpt.save, a step, a Checkpointer's root and the checkpoints beside "
            "its steps, a .distcp file, a checkpoint of DCP, Transformers or Accelerate, an "
            "export, or a directory of these",
            nargs="*",
        ),
        _local("also read its copies of each PATH or, without a PATH, everything in it"),
    ),
    "repair": _command(
        "list or remove the remains of killed saves",
        "Lists what killed saves left in a directory: temporary files and directories, steps "
        "that were never committed, and data files that no .metadata of DCP names. With --yes it "
        "removes remains that are certainly dead: those of processes of this host that have "
        "ended. Committed checkpoints stay, even damaged ones, and so does everything that a "
        "live process has locked or is known to be writing. The exit status is 0 if nothing is "
        "left, else 1.",
        _path(
            "directory",
            "DIR",
            "a Checkpointer's root, or a directory that checkpoints are saved to",
        ),
        _flag("--yes", "remove remains that are certainly dead"),
        _flag(
            "--other-hosts",
            "with --yes, also remove the remains of processes of other hosts (each node of a "
            "cluster is a host), and data files of DCP, which do not name their owner. Only you "
            "can know from their age, which is shown, whether these are dead, unless the lock of "
            "another node is visible here: first make sure that no job is saving to DIR",
        ),
        _flag(
            "--takeover",
            "release the root to the next job that saves there, although another job seems to be "
            "alive, as after a crash of its host; if that job is alive, its next save fails with "
            "RootInUse",
        ),
        _local("also list, or remove, the remains there of saves to DIR"),
    ),
    "report": _command(
        "show from a log why saves were slow",
        "Prints a line for each save in the log that Checkpointer(log=True) keeps, or with "
        "--step how long each phase of one save took, and on which rank. The exit status is 0, "
        "or 1 if there is no log, no such step, or the log is damaged.",
        _path("log", "LOG", "the log, or its root"),
        _any("--step", type=int, help="only the last save of this step, in detail"),
        _any(
            "--limit",
            type=quantity_argument(quantities.rate),
            metavar="RATE",
            help=(
                "the rate that the storage can sustain, such as 2.5GB/s: the report shows which "
                "share of it saves reached; default: the rate of the fastest save in the log"
            ),
        ),
    ),
    "doctor": _command(
        "show what fastckpt does on this machine and in a directory, and why",
        "Shows file system, backend, O_DIRECT, staging memory and GPU libraries, with the "
        "reasons. Writes one page to a file in DIR, and removes it. The exit status is 0 if "
        "saves to DIR would work, 1 if not, or if --gpu is given and torch finds no GPU.",
        _directory("default: ."),
        _flag("--gpu", "also use the GPU, which is left alone otherwise"),
    ),
}

_MEASURED = (
    " The files that it writes to DIR are removed afterwards. The exit status is 0; 1 if the "
    "measurement failed, or if the bytes read differ from those written; 130 if it was interrupted."
)
_ON = _directory(
    "a directory on the file system to measure; default: .",
    type=partial(path_argument, check=check_path),
)
_DEVICE = _any(
    "--device",
    choices=("cpu", "cuda"),
    help="the device that holds the state; default: a GPU if there is one",
)


def _sized(size: str, rounds: int) -> tuple[Argument, Argument]:
    text = f"default: {size}"
    as_size = _any("--size", type=quantity_argument(_size), default=size, help=text)
    return as_size, _any("--rounds", type=_positive, default=rounds, help=f"default: {rounds}")


_WHATS = {
    "io": _command(
        "compare the engine's writes and reads with fio's",
        "Writes and reads one file with fastckpt's engine, which also copies and checksums each "
        "block, for each backend, block size and queue depth (for threads, their number), in "
        "turn with fio if it is on PATH. fio uses io_uring, O_DIRECT, preallocated space and an "
        "fsync at the end. The bytes are compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 3),
        _flag("--quick", "measure fewer combinations"),
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
        "compare fastckpt.save with torch.save and safetensors",
        "Saves a random state with each, in turn, and measures two times: until the call returns "
        "(with the step fence, the next step() of an optimizer may wait for copies; `train` "
        "counts that), and until the bytes are durable, including an fsync. The files are loaded "
        "with torch.load or safetensors and compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
    ),
    "load": _command(
        "compare fastckpt.load with torch.load and safetensors",
        "Loads a random state from a file that each library wrote, in turn, after dropping the "
        "file from the page cache (if part of it stays, the caches of the whole machine are "
        "dropped where that is allowed). Mapped memory is read before the clock stops. The "
        "loaded tensors are compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
        _flag("--warm", "also load from the page cache"),
    ),
    "train": _command(
        "measure what saves cost a training loop",
        "Trains a small model without saves, with torch.save and fsync, and with fastckpt.save "
        "in the background, in turn. The clock of each stops when its last save is durable, so "
        "that no write is left out." + _MEASURED,
        _ON,
        *_sized("256MiB", 3),
        _DEVICE,
        _count("--every", "training steps between saves", 10),
        _count("--saves", "a round", 3),
    ),
}


def _add(parsers: Any, commands: dict[str, Command]) -> None:
    for name, (summary, description, arguments) in commands.items():
        parser = parsers.add_parser(name, help=summary, description=description)
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
        help="measure saves, loads and transfers here, compared with torch, safetensors and fio",
        description="Measures on this machine and in a directory. `fastckpt bench WHAT --help` "
        "says how each is measured." + _MEASURED,
    )
    _add(bench.add_subparsers(dest="what", metavar="WHAT", required=True), _WHATS)
    return parser
