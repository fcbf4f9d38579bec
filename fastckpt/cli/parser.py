"""The arguments of the command line, with the texts of `--help`.

It must import nothing that imports torch, which takes seconds and which `--help` does not need.
Therefore each command has its own module, which is imported when the command runs.
"""

from __future__ import annotations

import argparse
import ast
from functools import partial
from typing import Any

from fastckpt.arguments import quantities
from fastckpt.arguments.checks import check_path
from fastckpt.cli import advise
from fastckpt.cli.shared_arguments import path_argument, quantity_argument

_DTYPES = ("fp32", "bf16", "fp16")
_FORMATS = ("pt", "safetensors", "hf", "dcp", "step")
_NEWEST = "if the path is a root, also search there for its newest step"
_MIB = 1 << 20


# An argument's name or flag, and the other arguments of argparse's add_argument().
Argument = tuple[str, dict[str, Any]]
# A command's help, description and arguments, without --json, which all commands have.
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
    """Returns --local, which has the same meaning for all commands that have it."""
    text = (
        f"this node's local tier, as passed to Checkpointer(local=DIR): {what}. The tier may lack "
        "files that only other nodes hold. May be given several times"
    )
    return _path("--local", "DIR", text, action="append", default=[])


def _positive(text: str) -> int:
    """Parses a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _dtypes(text: str) -> str | dict[str, str]:
    """Parses a dtype or a dict of globs and dtypes, for argparse."""
    try:
        rules = {"*": text} if text in _DTYPES else ast.literal_eval(text)
        if {*map(type, rules)} <= {str} and {*rules.values()} <= {*_DTYPES}:
            return text if text in _DTYPES else rules
    except (ValueError, TypeError, SyntaxError, AttributeError, MemoryError, RecursionError):
        pass  # it is neither
    choices = ", ".join(_DTYPES)
    raise argparse.ArgumentTypeError(
        f"{text!r} must be one of {choices}, or a dict of globs and these"
    )


def _renaming(text: str) -> tuple[str, str]:
    """Parses OLD=NEW, a pattern of rename= and its replacement, for argparse."""
    old, _equals, new = text.rpartition("=")
    if not old:
        raise argparse.ArgumentTypeError(f"{text!r} must be OLD=NEW")
    return old, new


def _renamings(text: str) -> dict[Any, Any]:
    """Parses a Python dict for load_into(rename=), for argparse."""
    try:
        rules = ast.literal_eval(text.strip())
        if not isinstance(rules, dict):
            raise ValueError("it is not a dict")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r} must be a dict for load_into(rename=), such as {{"^model/": ""}}: {error}'
        ) from None
    return rules


def _size(text: str) -> int:
    nbytes = int(quantities.size(text))
    if nbytes < _MIB:
        raise quantities.NotAQuantity(f"{text!r} must be at least 1MiB")
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
        "Lists the steps of a Checkpointer's root, beginning with the last commit: their size, "
        "age, ranks, metrics and pins, and whether all files exist with the right sizes (`verify` "
        "also reads them). In a run of transformers' Trainer, lists each checkpoint-N, and "
        "whether it has fastckpt.json, the list of its files that fastckpt writes. The exit "
        "status is 0, or 1 if a step is damaged or there is none.",
        _path("root", "ROOT", "a Checkpointer's root, or the output_dir of a Trainer"),
        _local("also list its steps of ROOT"),
    ),
    "inspect": _command(
        "list the tensors of a checkpoint",
        "Lists the tensors of a checkpoint by name, with dtype, shape, size and files, without "
        "reading their data; and for a directory, each file with its size. No code of the "
        "checkpoint is run. The exit status is 0, or 1 if "
        "PATH is missing, damaged or not a checkpoint.",
        _path(
            "path",
            "PATH",
            "a file of fastckpt.save, torch.save or safetensors; a step; a Checkpointer's root "
            "(its newest complete step is read, and skipped steps are reported); or a directory "
            "of DCP, Megatron or Hugging Face, or a checkpoint-N of a Trainer",
        ),
        _GLOB,
        _local(_NEWEST),
    ),
    "diff": _command(
        "compare the tensors of two checkpoints",
        "Compares the tensors of two checkpoints of any kind by name, dtype, shape and contents. "
        "Tensors of different dtypes are compared as float64, integers as int64. Lists the "
        "largest differences first. Objects (all other values, and JSON files in a directory) are "
        "compared by a digest of their value. "
        'Names with "/" between keys match names of safetensors and DCP, which '
        'use ".". No code of the checkpoints is run. The exit status is 0 if the tensors are '
        "equal, whatever the objects are, and 1 if they differ, or if a path is missing, damaged "
        "or not a checkpoint.",
        _path("a", "A", "a checkpoint, like PATH of inspect"),
        _path("b", "B", "a checkpoint, like PATH of inspect"),
        _GLOB,
        _any(
            "--rename",
            action="append",
            type=_renaming,
            default=[],
            metavar="OLD=NEW",
            help=(
                "compare the names in A that match the regular expression OLD under the name NEW, "
                "like load_into(rename={OLD: NEW}); '^model/=' removes that prefix. OLD ends at "
                "the last =. May be given several times, in the order of use"
            ),
        ),
        _local(_NEWEST),
    ),
    "convert": _command(
        "copy the tensors of a checkpoint into another format",
        "Copies only the tensors of a checkpoint of any kind, and lists the values that it leaves "
        "out. Without --dtype, all bits are copied unchanged. No code of SRC is run. Data with "
        "checksums is verified. DST appears only when it is complete and durable. The exit "
        "status is 0, or 1 if the copy failed.",
        _path("source", "SRC", "a checkpoint, like PATH of inspect"),
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
                'safetensors files with an index, like Hugging Face\'s; "dcp": a directory of '
                'torch.distributed.checkpoint; "step": a step of a Checkpointer, whose root is '
                'DST. "pt", "dcp" and "step" need space next to DST for an unnamed temporary '
                "file as large as the tensors"
            ),
        ),
        _any("--glob", default="*", help="only tensors whose names in inspect match this glob"),
        _any(
            "--prefix",
            default="",
            help=(
                "only tensors whose names in inspect begin with this prefix, such as model/; the "
                "prefix is removed"
            ),
        ),
        _any(
            "--rename",
            type=_renamings,
            default={},
            metavar="DICT",
            help=(
                "new names: a Python dict of patterns, like load_into(rename=)'s, such as "
                '\'{"^model/": "", "^optimizer/": None}\', where None leaves tensors out. --glob '
                "and --prefix then apply to the new names"
            ),
        ),
        _any(
            "--dtype",
            type=_dtypes,
            help=(
                f"convert floating-point tensors to this dtype: {', '.join(_DTYPES)}. Or a Python "
                "dict of globs of new names and dtypes, such as "
                '\'{"*.bias": "fp32", "*": "bf16"}\'; the first glob that matches counts'
            ),
        ),
        _path(
            "--files",
            "DIR",
            "for hf, copy config and tokenizer files from this directory; default: from SRC, if it "
            "is a directory of Hugging Face",
        ),
        _any(
            "--shard-size",
            default="5GB",
            metavar="SIZE",
            help="largest size of a file of hf; default: 5GB",
        ),
        _any("--step", type=int, help="the step's number; default: SRC's number, or 0"),
        _local(_NEWEST),
    ),
    "verify": _command(
        "read checkpoints and compare all checksums",
        "Reads every byte under each PATH and compares checksums. The exit status is 0 if all "
        "bytes are as written; 1 if a file is damaged or missing, or a PATH holds no checkpoint; "
        "3 if no damage was found, but a file could not be read in several attempts; 4 if no "
        "damage was found, but a file has no checksums (such as files of stock torch or "
        'safetensors): it is listed as "unchecked", and may be damaged.',
        _path(
            "paths",
            "PATH",
            "a file of fastckpt.save, a step, a Checkpointer's root with all checkpoints in it, "
            "a .distcp file, a checkpoint of DCP, Transformers or Accelerate, an export, or a "
            "directory of these",
            nargs="*",
        ),
        _local("also read its copies of each PATH or, without a PATH, the whole tier"),
    ),
    "repair": _command(
        "list or remove the remains of killed saves",
        "Lists the remains of killed saves in a directory: temporary files and directories, steps "
        "that were never committed, and data files that no .metadata of DCP names. With --yes it "
        "removes remains that are certainly dead: those of processes of this host that have "
        "ended. It never removes committed checkpoints, even damaged ones, or files that a live "
        "process has locked or is known to be writing. The exit status is 0 if no remains are "
        "left, else 1.",
        _path(
            "directory",
            "DIR",
            "a Checkpointer's root, or a directory that checkpoints are saved to",
        ),
        _flag("--yes", "remove remains that are certainly dead"),
        _flag(
            "--other-hosts",
            "with --yes, also remove the remains of other hosts' processes (each node of a "
            "cluster is a host), and data files of DCP, which do not name their owner. Unless "
            "another node's lock is visible here, fastckpt cannot tell whether these are dead: "
            "first check their age, which is shown, and make sure that no job is saving to DIR",
        ),
        _flag(
            "--takeover",
            "release the root to the next job that saves there, although another job seems to be "
            "alive, for example after a crash of its host. If that job is alive, its next save "
            "fails with RootInUse",
        ),
        _local("also list or remove its remains of saves to DIR"),
    ),
    "report": _command(
        "show from a log why saves were slow",
        "Prints a line for each save in the log of Checkpointer(log=True). With --step, prints "
        "how long each phase of one save took, and on which rank. The exit status is 0, or 1 if "
        "the log or the step is missing, or the log is damaged.",
        _path("log", "LOG", "the log file, or its root"),
        _any("--step", type=int, help="only the last save of this step, in detail"),
        _any(
            "--limit",
            type=quantity_argument(quantities.rate),
            metavar="RATE",
            help=(
                "the rate that the storage can sustain, such as 2.5GB/s. The report shows the "
                "share of it that saves reached. Default: the rate of the fastest save in the log"
            ),
        ),
    ),
    "doctor": _command(
        "show what fastckpt does on this machine and in a directory, and why",
        "Shows file system, backend, O_DIRECT, staging memory and GPU libraries, with the "
        "reasons. Writes one page to a file in DIR, and removes it. The exit status is 0 if "
        "saves to DIR would work, 1 if not, or if --gpu is given and torch finds no GPU.",
        _directory("default: ."),
        _flag("--gpu", "also test the GPU, which is not used otherwise"),
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
    help="the device that holds the state; default: a GPU if torch finds one",
)


def _sized(size: str, rounds: int) -> tuple[Argument, Argument]:
    text = f"default: {size}"
    as_size = _any("--size", type=quantity_argument(_size), default=size, help=text)
    return as_size, _any("--rounds", type=_positive, default=rounds, help=f"default: {rounds}")


_WHATS = {
    "io": _command(
        "compare the engine's writes and reads with fio's",
        "Writes and reads a file with fastckpt's engine for each backend, block size and queue "
        "depth (for threads, the number of threads), in turn with fio if it is on PATH. The "
        "engine also copies and checksums each block. fio uses io_uring, O_DIRECT, preallocated "
        "space and an fsync at the end. The bytes are compared." + _MEASURED,
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
        "Saves a random state with each library in turn, and measures the time until the call "
        "returns and the time until the bytes are durable, including an fsync. With the step "
        "fence, the next step() of an optimizer may also wait for copies, which only `train` "
        "measures. The files are loaded with torch.load or safetensors and compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
    ),
    "load": _command(
        "compare fastckpt.load with torch.load and safetensors",
        "Loads a random state with each library in turn, from a file that it wrote. The file is "
        "first dropped from the page cache; if a part of it stays, the caches of the whole machine "
        "are dropped where this is allowed. Mapped memory is read before the clock stops. The "
        "loaded tensors are compared." + _MEASURED,
        _ON,
        *_sized("512MiB", 5),
        _DEVICE,
        _flag("--warm", "also load from the page cache"),
    ),
    "train": _command(
        "measure what saves cost a training loop",
        "Trains a small model in turn without saves, with torch.save and fsync, and with "
        "fastckpt.save in the background. Each measurement ends when its last save is durable, so "
        "that it includes all writes." + _MEASURED,
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
        # Lets the command refuse arguments like argparse, with status 2.
        parser.set_defaults(error=parser.error)


def make_parser(version: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `command` in its result is a module's name."""
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
        "describes each measurement." + _MEASURED,
    )
    _add(bench.add_subparsers(dest="what", metavar="WHAT", required=True), _WHATS)
    return parser
