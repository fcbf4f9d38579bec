"""`fastckpt bench`: measures fastckpt and the tools that it replaces, on this machine and file
system.

The module has the common parts of all measurements: free space, cleanup, output and exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch

from fastckpt.cli.bench import io, saves, train
from fastckpt.cli.bench.benchmark import Command, check_room, own_directory
from fastckpt.cli.bench.machine import environment

COMMANDS = {
    "io": io.COMMAND,
    "save": saves.SAVE,
    "load": saves.LOAD,
    "train": train.COMMAND,
}


def run(arguments: argparse.Namespace) -> int:
    command: Command = COMMANDS[arguments.what]
    directory = os.path.realpath(arguments.directory)
    if "device" in arguments:
        there = torch.cuda.is_available()
        arguments.device = arguments.device or ("cuda" if there else "cpu")
        if arguments.device == "cuda" and not there:
            raise ValueError("torch finds no GPU")
    with own_directory(directory, "fastckpt-bench-") as own:
        check_room(directory, command.needed(arguments))
        machine = environment(directory)
        with saves.failures_told("the measurement"):  # such as too little memory
            result = command.measured(own, arguments)
    if arguments.json:
        print(json.dumps({"what": arguments.what, "environment": machine, **result}, indent=1))
    else:
        _print_machine(machine)
        for line in command.lines(result):
            print(line)
    for wrong in result["wrong"]:
        print(f"fastckpt bench: the bytes read differ from those written: {wrong}", file=sys.stderr)
    return int(bool(result["wrong"]))


def _print_machine(machine: dict[str, Any]) -> None:
    gpus = f", {machine['gpus'][0]}" if machine["gpus"] else ""
    print(
        f"{machine['directory']}: {machine['file_system']}; {machine['cpu']}, "
        f"{machine['cpus']} CPUs{gpus}; {machine['kernel']}; torch {machine['torch']}, "
        f"fastckpt {machine['fastckpt']}"
    )
