"""`fastckpt advise`: predicts what checkpoints of a job will cost, and says how to take them.

The module turns arguments into a Job, whose numbers are given or assumed, and prints the report. It
must not know a formula: those are in fastckpt/cli/cost_model.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from fastckpt.arguments import quantities
from fastckpt.arguments.quantities import shown_rate, shown_size, shown_time
from fastckpt.cli import cost_model
from fastckpt.cli.cost_model import Advice, BlockingSave, Job
from fastckpt.cli.shared_arguments import quantity_argument

_GPUS_PER_NODE = 8


class JobArgument(NamedTuple):
    """A command-line option for one input of a Job."""

    flag: str
    read: Any
    unit: str
    text: str


OPTIONS = {
    "d2h_rate": JobArgument("--d2h", quantities.rate, "RATE", "each GPU to pinned host memory"),
    "writer_rate": JobArgument("--writer", quantities.rate, "RATE", "what one process writes"),
    "network_rate": JobArgument("--network", quantities.rate, "RATE", "a node to the storage"),
    "osts": JobArgument("--osts", int, "N", "storage targets of the file system (lfs df)"),
    "ost_rate": JobArgument("--ost", quantities.rate, "RATE", "each storage target"),
    "nvme_rate": JobArgument(
        "--nvme", quantities.rate, "RATE", "a node's local disks, written first"
    ),
    "staging_bytes": JobArgument(
        "--staging", quantities.size, "SIZE", "host memory a node has for it"
    ),
    "step_s": JobArgument("--step-time", quantities.time, "TIME", "of a training step"),
    "commit_s": JobArgument(
        "--commit-time", quantities.time, "TIME", "agreement, syncs and renames"
    ),
    "restart_s": JobArgument(
        "--restart-time", quantities.time, "TIME", "failure to first new step"
    ),
    "torch_rate": JobArgument(
        "--torch", quantities.rate, "RATE", "one torch.save, to compare with"
    ),
    "few_writers": JobArgument("--few-writers", int, "N", "processes that call torch.save there"),
}
_SHOWN_AS: dict[Any, Callable[[Any], str]] = {
    quantities.rate: shown_rate,
    quantities.size: shown_size,
    quantities.time: shown_time,
    int: str,
}
_UNKNOWN = {
    "osts": "unknown: taken as no limit",
    "nvme_rate": "none",
    "staging_bytes": "enough for a node's part",
    "few_writers": "one for each node",
    "step_s": "unknown: nothing is counted as hidden",
}


class SourcedJob(NamedTuple):
    """A Job, and for each of its inputs its source: "given" or "assumed", say."""

    job: Job
    sources: dict[str, str]


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="what checkpoints of a job will cost, and how to take them",
        description="Predicts stall, commit and loss of checkpoints from a model (docs/scale.md). "
        "Sizes are as 4.3TiB or 24GB, rates as 75GB/s, times as 3h, 5min or 20ms.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--params",
        type=quantity_argument(quantities.count),
        metavar="N",
        help="parameters, as 340e9",
    )
    what.add_argument(
        "--size", type=quantity_argument(quantities.size), help="of one checkpoint in all"
    )
    parser.add_argument(
        "--bytes-per-param",
        type=float,
        default=cost_model.BYTES_PER_PARAMETER,
        metavar="N",
        help="default: %(default)g, mixed precision with Adam",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks of the job")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help=f"default: one for {_GPUS_PER_NODE} GPUs"
    )
    failures = parser.add_mutually_exclusive_group()
    failures.add_argument(
        "--mtbf", type=quantity_argument(quantities.time), metavar="TIME", help="of the whole job"
    )
    failures.add_argument(
        "--failures-per-gpu-hour",
        type=float,
        metavar="N",
        help=f"default: {cost_model.FAILURES_PER_GPU_HOUR:.2e}, Llama 3's",
    )
    defaults = {field.name: field.default for field in fields(Job)}
    for name, option in OPTIONS.items():
        known = _shown(name, defaults[name])
        parser.add_argument(
            option.flag,
            dest=name,
            type=quantity_argument(option.read),
            metavar=option.unit,
            help=f"{option.text}; default: {known}",
        )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.set_defaults(error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    try:
        inputs = _inputs(arguments)
    except ValueError as error:
        arguments.error(str(error))
    advised = cost_model.advise(inputs.job)
    if arguments.json:
        spare = cost_model.arguments(inputs.job, advised)
        told = {"inputs": asdict(inputs.job), "sources": inputs.sources}
        print(json.dumps(told | {"advice": asdict(advised), "arguments": spare}, indent=2))
    else:
        print("\n".join(_report(inputs, advised)))
    return 0


def _inputs(arguments: argparse.Namespace) -> SourcedJob:
    """Returns the inputs: those given, else assumed. Raises ValueError as Job."""
    sources = {"ranks": "given"}
    values: dict[str, Any] = {}
    for name in OPTIONS:
        given = getattr(arguments, name)
        if given is not None:
            values[name], sources[name] = given, "given"
        else:
            sources[name] = "assumed"
    size = arguments.size
    if size is None:
        size = cost_model.state_bytes(arguments.params, arguments.bytes_per_param)
    sources["nbytes"] = "given"
    if arguments.params is not None:
        sources["nbytes"] = f"{arguments.bytes_per_param:g} bytes for each parameter"
    nodes = arguments.nodes
    sources["nodes"] = "given"
    if nodes is None:
        nodes, sources["nodes"] = -(-arguments.gpus // _GPUS_PER_NODE), "assumed"
    mtbf_s, sources["mtbf_s"] = arguments.mtbf, "given"
    if mtbf_s is None:
        rate, sources["mtbf_s"] = arguments.failures_per_gpu_hour, "from the failures given"
        if rate is None:
            rate, sources["mtbf_s"] = cost_model.FAILURES_PER_GPU_HOUR, "assumed, as Llama 3's"
        mtbf_s = cost_model.mtbf_s(arguments.gpus, rate)
    job = Job(nbytes=size, ranks=arguments.gpus, nodes=nodes, mtbf_s=mtbf_s, **values)
    return SourcedJob(job, {field.name: sources[field.name] for field in fields(Job)})


def _shown(name: str, value: Any) -> str:
    if value is None or (name == "step_s" and not value):
        return _UNKNOWN[name]
    return _SHOWN_AS[OPTIONS[name].read](value)


def _report(inputs: SourcedJob, advised: Advice) -> list[str]:
    return [
        *_lines("The job", _job_rows(inputs)),
        *_lines("A checkpoint", _cost_rows(advised)),
        *_lines("What to do", _advice_rows(inputs.job, advised)),
        *_lines("Beside it, torch.save while training waits", _torch_rows(advised)),
    ]


def _job_rows(inputs: SourcedJob) -> list[tuple[str, str]]:
    job, sources = inputs.job, inputs.sources
    rows = [
        ("size of a checkpoint", f"{shown_size(job.nbytes)} ({sources['nbytes']})"),
        ("ranks, nodes", f"{job.ranks}, {job.nodes} (nodes: {sources['nodes']})"),
        ("time between failures", f"{shown_time(job.mtbf_s)} ({sources['mtbf_s']})"),
    ]
    for name, option in OPTIONS.items():
        source = sources[name]
        rows.append((option.text, f"{_shown(name, getattr(job, name))} ({source}, {option.flag})"))
    return rows


def _cost_rows(advised: Advice) -> list[tuple[str, str]]:
    stages = ", ".join(f"{name} {shown_time(s)}" for name, s in advised.stages.items() if s)
    rows = [
        ("training stands still, call fence", shown_time(advised.stall_call_s)),
        ("training stands still, step fence", shown_time(advised.stall_step_s)),
        ("  which goes to", advised.stall_bottleneck),
        ("copied to the host after", shown_time(advised.staged_s)),
    ]
    if advised.local_s is not None:
        rows.append(("committed on local disks after", shown_time(advised.local_s)))
    return [
        *rows,
        ("committed on the storage after", shown_time(advised.root_s)),
        ("  written at", shown_rate(advised.root_rate)),
        ("  bottleneck", advised.bottleneck),
        ("  each by itself", stages),
    ]


def _advice_rows(job: Job, advised: Advice) -> list[tuple[str, str]]:
    steps = f", {advised.interval_steps} steps" if advised.interval_steps is not None else ""
    at_most = "" if job.ranks % job.nodes == 0 else "at most "  # some nodes have one rank less
    per_node = f"{at_most}{advised.writers_per_node} of {job.ranks_per_node} on each node"
    stripe = shown_size(advised.file_stripe_bytes)
    late = shown_time(advised.shared_root_s)
    shared = f"{advised.shared_stripes} stripes of {shown_size(advised.shared_stripe_bytes)}"
    return [
        ("fence", advised.fence),
        ("checkpoint every", f"{shown_time(advised.interval_s)}{steps}"),
        ("time lost, with failures", _percent(advised.lost_share)),
        ("slowest drain that keeps up", f"{shown_rate(advised.pace_rate)} a node"),
        ("  time lost at that pace", _percent(advised.paced_lost_share)),
        ("writers that are enough", f"{advised.writers}: {per_node}"),
        ("arguments that spare the storage", _arguments_text(job, advised)),
        ("Lustre, a file for each rank", f"{advised.file_stripes} stripes of {stripe}"),
        ("Lustre, one shared file", f"{shared}: committed after {late}"),
    ]


def _arguments_text(job: Job, advised: Advice) -> str:
    """Returns the arguments as they are passed to Checkpointer."""
    found = cost_model.arguments(job, advised)
    return ", ".join(f"{name}={value:g}" for name, value in found.items()) or "none"


def _torch_rows(advised: Advice) -> list[tuple[str, str]]:
    if advised.torch_few == advised.torch_one:
        return [_torch_row(advised.torch_one)]
    return [_torch_row(advised.torch_one), _torch_row(advised.torch_few)]


def _torch_row(found: BlockingSave) -> tuple[str, str]:
    return (
        f"{found.writers} writer{'s' if found.writers > 1 else ''}",
        f"{shown_time(found.seconds)} each, every {shown_time(found.interval_s)}: "
        f"{_percent(found.lost_share)} of time lost",
    )


def _percent(share: float) -> str:
    return "all of it: no progress" if share >= 1 else f"{100 * share:.2f} %"


def _lines(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return ["", title, *(f"  {name:{width}}  {text}" for name, text in rows)]
