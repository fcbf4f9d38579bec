"""The arguments of the command line: what each command takes, and what `--help` says of it.

It must import nothing that imports torch, which takes seconds and which `--help` does not need. So
what a command does lies in a module of its own, which is imported when the command is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fastckpt.arguments import quantities
from fastckpt.cli import advise, bench_arguments
from fastckpt.cli.shared_arguments import add_json, path_argument, quantity_argument

CONVERT_DTYPES = ("fp32", "bf16", "fp16")
_FORMATS = ("pt", "safetensors", "hf", "dcp", "step")
_NEWEST = "of a root, also look for the newest step there"
_GLOB = 'only names like this, such as "*.weight"'


def make_parser(version: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `command` of what it returns is a module's name."""
    parser = argparse.ArgumentParser(
        prog="fastckpt", description="Asynchronous, durable checkpoints for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fastckpt {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_ls, _inspect, _diff, _convert, _verify, _repair, _report, _doctor):
        add(commands)
    advise.add_arguments(commands)
    bench_arguments.add_arguments(commands)
    return parser


def _add_local(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --local, which means the same to every command that has it."""
    parser.add_argument(
        "--local",
        action="append",
        default=[],
        type=path_argument,
        metavar="DIR",
        help="this node's local tier, as given to Checkpointer(local=DIR), where files that only "
        f"other nodes have may be missing: {what}; may be given several times",
    )


def _ls(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the steps under a root",
        description="Lists the steps of a Checkpointer's root, the one committed last first: size, "
        "age, ranks, and whether all their files are there with the right sizes (`verify` reads "
        "them, too); or its exports. The exit status is 0, or 1 if a step is damaged "
        "or there is nothing.",
    )
    help_of_root = "a Checkpointer's root, or the directory of its exports"
    parser.add_argument("root", type=path_argument, metavar="ROOT", help=help_of_root)
    _add_local(parser, "also list what it has of ROOT")
    add_json(parser)


def _inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list the tensors of a checkpoint",
        description="Lists the tensors of a checkpoint by name, with dtype, shape, size and files, "
        "and reads none of them. Nothing of the checkpoint is run. The exit status is 0, or 1 if "
        "PATH is missing, damaged or no checkpoint.",
    )
    parser.add_argument(
        "path",
        type=path_argument,
        metavar="PATH",
        help="a file of fastckpt.save, torch.save or safetensors, a step or a Checkpointer's root "
        "(its newest step that is whole; what is passed over is told), or a directory of DCP, "
        "Megatron or Hugging Face",
    )
    parser.add_argument("--glob", default="*", help=_GLOB)
    _add_local(parser, _NEWEST)
    add_json(parser)


def _diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare the tensors of two checkpoints",
        description="Compares two checkpoints of any kind: names, dtypes, shapes and contents of "
        'their tensors, and nothing else. Names with "/" between keys fit those of safetensors and '
        'DCP, which have ".". Nothing of them is run. The exit status is 0 if the tensors are '
        "equal, and 1 if they differ, or one is missing, damaged or no checkpoint.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, type=path_argument, metavar=name.upper(), help="as inspect's PATH"
        )
    parser.add_argument("--glob", default="*", help=_GLOB)
    _add_local(parser, _NEWEST)
    add_json(parser)


def _convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="copy the tensors of a checkpoint into another format",
        description="Copies the tensors of a checkpoint of any kind, bit by bit unless --dtype is "
        "given, and nothing else of it: no steps, no objects. Nothing of SRC is run. What is "
        "verified when read is verified. DST appears when it is whole and durable, or not at all. "
        "The exit status is 0, or 1 if something could not be done.",
    )
    parser.add_argument("source", type=path_argument, metavar="SRC", help="as inspect's PATH")
    parser.add_argument(
        "target",
        type=path_argument,
        metavar="DST",
        help="the path to make, which must not exist (a root of steps may)",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=_FORMATS,
        help='"pt": a file for torch.load; "safetensors": one file; "hf": a directory of '
        "safetensors files with an index, as Hugging Face has; "
        '"dcp": a directory of torch.distributed.checkpoint; "step": a step of a Checkpointer, '
        "whose root is DST. The first, fourth and fifth pass through an unnamed file of the size "
        "of the tensors beside DST",
    )
    parser.add_argument("--glob", default="*", help="only tensors of such names, as inspect has")
    parser.add_argument(
        "--prefix",
        default="",
        help="only tensors whose name begins with this, which is taken off; for safetensors and hf "
        'names have "." between keys ("model."), else they are those that inspect lists ("model/")',
    )
    parser.add_argument(
        "--dtype",
        choices=CONVERT_DTYPES,
        help="convert tensors of floating-point numbers to this dtype",
    )
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="of hf's files, default: 5GB"
    )
    parser.add_argument(
        "--step", type=int, help="the number of the step; default: that of SRC, or 0"
    )
    _add_local(parser, _NEWEST)
    add_json(parser)


def _verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read checkpoints and compare all checksums",
        description="Reads every byte under each PATH and compares checksums. The exit status is 0 "
        "if all is as it was written; 1 if something is damaged or missing, or a PATH holds no "
        "checkpoint; 3 if none of that was found, but something could not be read in several "
        "attempts; 4 if the rest is as it was written, but something has no checksums (stock files "
        'of torch or safetensors), is told as "unchecked", and may be damaged or not.',
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=path_argument,
        metavar="PATH",
        help="a file of fastckpt.save, a step, a Checkpointer's root with what lies beside its "
        "steps, a .distcp file, a checkpoint of DCP, Transformers or Accelerate, an export, or a "
        "directory of such",
    )
    _add_local(parser, "also read what it has of each PATH, or without a PATH all that it has")
    add_json(parser)
    _set_error(parser)


def _repair(commands: Any) -> None:
    parser = commands.add_parser(
        "repair",
        help="list, and remove, what dead saves left behind",
        description="Lists what saves left in a directory that were killed: temporary files and "
        "directories, steps that were never committed, and data files that no .metadata of DCP "
        "names. With --yes it removes what is surely dead: what a process of this host left that "
        "is gone. Committed checkpoints, damaged ones too, and what a live process has locked or "
        "is known to be writing stay. The exit status is 0 if nothing is left, else 1.",
    )
    parser.add_argument(
        "directory",
        type=path_argument,
        metavar="DIR",
        help="a Checkpointer's root, or a directory that checkpoints are saved to",
    )
    parser.add_argument("--yes", action="store_true", help="remove what is surely dead")
    parser.add_argument(
        "--other-hosts",
        action="store_true",
        help="with --yes, also remove what processes of other hosts left (each node of a cluster "
        "is one), and data files of DCP, which do not say whose they are. Whether these are dead "
        "only you can know, by their age, which is shown, unless another node's lock is seen "
        "here: first see to it that no job is saving to DIR",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="leave the root to the job that saves there next, although another one seems to live, "
        "as after a crash of its host; if it does live, its next save fails with RootInUse",
    )
    _add_local(parser, "also list, and remove, what saves left there on their way to DIR")
    add_json(parser)


def _report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="tell from a log why saves were slow",
        description="Prints a line for each save in the log that Checkpointer(log=True) keeps, or "
        "with --step how long each phase of one save took, and on which rank. The exit status is "
        "0, or 1 if there is no log, no such step, or the log is damaged.",
    )
    parser.add_argument("log", type=path_argument, metavar="LOG", help="the log, or its root")
    parser.add_argument("--step", type=int, help="only this step, in detail: its last save")
    parser.add_argument(
        "--png",
        type=path_argument,
        metavar="FILE",
        help="draw the ranks of one save over time into a PNG (needs matplotlib): that of --step, "
        "or else the slowest",
    )
    parser.add_argument(
        "--limit",
        type=quantity_argument(quantities.rate),
        metavar="RATE",
        help="what the storage can take, such as 2.5GB/s, of which the share is shown that saves "
        "reached; default: the rate of the fastest save in the log",
    )
    add_json(parser)


def _doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what fastckpt does on this machine and in a directory, and why",
        description="Shows file system, backend, O_DIRECT, staging memory and GPU libraries, with "
        "the reasons. Writes one page to a file in DIR, and removes it. The exit status is 0 if "
        "saves to DIR would work, 1 if not, or if --gpu is given and torch finds no GPU.",
    )
    parser.add_argument(
        "directory", nargs="?", default=".", type=path_argument, metavar="DIR", help="default: ."
    )
    parser.add_argument(
        "--gpu", action="store_true", help="use the GPU to find out more; else it stays untouched"
    )
    add_json(parser)


def _set_error(parser: argparse.ArgumentParser) -> None:
    """Lets a command refuse arguments that it has looked at as argparse does, with status 2."""
    error: Callable[[str], Any] = parser.error
    parser.set_defaults(error=error)
