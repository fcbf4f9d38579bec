"""`fastckpt bench`: measures fastckpt on this machine and a file system, beside what it replaces.

The module has what all measurements have in common: arguments, room, removal, output, exit status.
It must not know how anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch

from fastckpt.arguments import quantities
from fastckpt.cli.bench import io, ranks, saves, train
from fastckpt.cli.bench.benchmark import Command, positive
from fastckpt.cli.bench.machine import environment
from fastckpt.cli.scratch import check_room, own_directory
from fastckpt.cli.shared_arguments import add_json, path_argument, quantity_argument

COMMANDS = {
    "io": io.COMMAND,
    "save": saves.SAVE,
    "load": saves.LOAD,
    "train": train.COMMAND,
    "ranks": ranks.COMMAND,
}
_SIZE_MIN = 1 << 20
_STATUS = (
    " All that is written to DIR is removed again. The exit status is 0; 1 if it could not be "
    "measured, or if bytes came back other than they were written; 130 if it was interrupted."
)


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure saves, loads and transfers here, beside torch, safetensors and fio",
        description="Measures on this machine and in a directory. `fastckpt bench WHAT --help` "
        "says how each is measured." + _STATUS,
    )
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, command in COMMANDS.items():
        told = command.description + _STATUS
        what = whats.add_parser(name, help=command.help, description=told)
        told = "on the file system that is measured; default: ."
        what.add_argument(
            "directory", nargs="?", default=".", type=path_argument, metavar="DIR", help=told
        )
        for flag, read, default in (
            ("--size", quantity_argument(_size), command.size),
            ("--rounds", positive, command.rounds),
        ):
            what.add_argument(flag, type=read, default=default, help=f"default: {default}")
        if command.on_devices:
            told = "where the state lies; default: a GPU if there is one"
            what.add_argument("--device", choices=("cpu", "cuda"), help=told)
        command.add_arguments(what)
        add_json(what)
        what.set_defaults(run=run)


def _size(text: str) -> int:
    nbytes = int(quantities.size(text))
    if nbytes < _SIZE_MIN:
        raise quantities.NotAQuantity(f"{text!r} is less than 1MiB")
    return nbytes


def run(arguments: argparse.Namespace) -> int:
    command: Command = COMMANDS[arguments.what]
    directory = os.path.realpath(arguments.directory)
    if command.on_devices:
        there = torch.cuda.is_available()
        arguments.device = arguments.device or ("cuda" if there else "cpu")
        if arguments.device == "cuda" and not there:
            raise ValueError("torch finds no GPU")
    with own_directory(directory, "fastckpt-bench-") as own:
        check_room(directory, command.needed(arguments))
        machine = environment(directory)
        with saves.failures_told("the measurement"):  # there is too little memory, say
            result = command.measured(own, arguments)
    if arguments.json:
        print(json.dumps({"what": arguments.what, "environment": machine, **result}, indent=1))
    else:
        _print_machine(machine)
        for line in command.lines(result):
            print(line)
    for wrong in result["wrong"]:
        print(f"fastckpt bench: other bytes came back: {wrong}", file=sys.stderr)
    return int(bool(result["wrong"]))


def _print_machine(machine: dict[str, Any]) -> None:
    gpus = f", {machine['gpus'][0]}" if machine["gpus"] else ""
    print(
        f"{machine['directory']}: {machine['file_system']}; {machine['cpu']}, "
        f"{machine['cpus']} CPUs{gpus}; {machine['kernel']}; torch {machine['torch']}, "
        f"fastckpt {machine['fastckpt']}"
    )
