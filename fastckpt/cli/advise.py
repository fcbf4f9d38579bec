"""`fastckpt advise`: predicts what checkpoints of a job cost, and how often to take one.

Each formula names its source; docs/project/scale.md compares predictions with published
measurements. The module imports what imports torch only when it is asked.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from math import ceil, isfinite, sqrt
from typing import Any, NamedTuple

from fastckpt.arguments import quantities
from fastckpt.arguments.quantities import shown_rate, shown_size, shown_time
from fastckpt.cli.shared_arguments import quantity_argument

# Mixed precision with Adam: 2 bytes for the bf16 weight, and 4 each for its fp32 copy and two
# moments (Rajbhandari et al., ZeRO, SC 2020, without the gradients).
BYTES_PER_PARAMETER = 14.0
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
CALL_S = 0.02  # a call that copies nothing; README.md has 0.012 s for 2 GiB
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Job:
    """A training job and its machine, in bytes, bytes per second and seconds; see _OPTIONS. Raises
    ValueError for a number that is not finite, not positive, or contradicts the others.
    """

    nbytes: float  # of one checkpoint, without replicas
    ranks: int  # one for each GPU; all of them write
    nodes: int
    mtbf_s: float  # of the whole job
    d2h_rate: float = 25e9  # PCIe 4 x16 in practice
    writer_rate: float = 2e9  # less than to a good disk
    network_rate: float = 6e9  # a Lustre client's at LUG 2024
    osts: int | None = None  # no limit
    ost_rate: float = 4e9  # as ALCF's Eagle: 650 GB/s by 160 targets
    nvme_rate: float | None = None  # checkpoints go straight to the storage
    staging_bytes: float | None = None  # enough for a node's part
    step_s: float = 0.0  # not known, so no copy counts as hidden by a step
    commit_s: float = 0.5
    restart_s: float = 300.0
    torch_rate: float = 0.7e9  # docs/project/measurements.md's
    torch_writers: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name in ("step_s", "commit_s", "restart_s", "staging_bytes")
            if value is not None and not (
                isfinite(value) and value >= (0 if may_be_zero else 1e-9)
            ):
                least = "0 or more" if may_be_zero else "above 0"
                raise ValueError(f"{name} is {value}, must be finite and {least}")
        for name in ("nodes", "torch_writers"):
            if getattr(self, name) > self.ranks:
                message = (
                    f"{name} is {getattr(self, name)}, more than there are ranks ({self.ranks})"
                )
                raise ValueError(message)

    @property
    def rank_bytes(self) -> float:
        """The part of one rank: ranks that hold the same tensor divide it evenly."""
        return self.nbytes / self.ranks

    @property
    def node_bytes(self) -> float:
        """The part of the node that has most ranks."""
        return self.rank_bytes * ceil(self.ranks / self.nodes)


@dataclass(frozen=True)
class Advice:
    """The forecast and the advice, in bytes per second and seconds."""

    stall_call_s: float  # how long training waits for a checkpoint with the call fence
    stall_step_s: float  # and with the step fence
    staged_s: float  # when everything has been copied to the host
    local_s: float | None  # when it is committed on the local disks, if there are any
    root_s: float  # and on the storage
    stages: dict[str, float]  # how long each resource takes by itself, as bytes pass them
    bottleneck: str
    root_rate: float  # of all writers together, to the storage
    interval_s: float  # from one save() to the next, with the step fence
    interval_steps: int | None  # None if the time of a step is not known
    lost_share: float  # of all time, which stalls and failures cost
    drain_rate: float  # of a node: the lowest that is done before the next checkpoint
    torch_s: float  # the same of torch.save, while training waits
    torch_interval_s: float
    torch_lost_share: float


def advise(job: Job) -> Advice:
    """Returns what checkpoints of a job will cost, and how often to take one.

    The stages of a save run at the same time, block by block, so it takes as long as the slowest.
    With local disks one save follows the other: to the disks, and from there to the storage. The
    model leaves out that training may be slower meanwhile, and that others use the storage, too.
    """
    from fastckpt.storage.lustre_layout import own_stripes

    def targets_s(files: int, stripes: int) -> float:
        """Returns how long the storage targets take for files of so many stripes each."""
        return job.nbytes / (min(job.osts, files * stripes) * job.ost_rate) if job.osts else 0.0

    stages = {"GPU-to-host copies": job.rank_bytes / job.d2h_rate}
    if job.nvme_rate is not None:
        stages["local NVMe"] = job.node_bytes / job.nvme_rate
    way = {
        "writing processes": job.rank_bytes / job.writer_rate,
        "network of the nodes": job.node_bytes / job.network_rate,
        "storage targets": targets_s(job.ranks, own_stripes(int(job.rank_bytes), job.osts)),
    }
    drain_s = first_s = max(way.values())
    if job.nvme_rate is not None:
        first_s = max(way["writing processes"], stages["local NVMe"])
    # Copying fills staging memory B while writing empties it, so a part P is copied when P - B has
    # been written.
    missing = max(0.0, job.node_bytes - (job.staging_bytes or 0)) / job.node_bytes * first_s
    waiting_s = 0.0 if job.staging_bytes is None else missing
    staged_s = max(stages["GPU-to-host copies"], waiting_s)
    local_s, root_s = None, max(staged_s, first_s) + job.commit_s
    if job.nvme_rate is not None:
        local_s, root_s = root_s, root_s + drain_s + job.commit_s
    stall_step_s = CALL_S + max(0.0, staged_s - job.step_s)
    interval_s = best_interval_s(stall_step_s, root_s, job.mtbf_s)
    # Each file of torch.save is on one target, which is Lustre's default.
    writers = job.torch_writers
    rate = min(writers * job.torch_rate, min(writers, job.nodes) * job.network_rate)
    torch_s = max(job.nbytes / rate, targets_s(writers, 1))
    torch_interval_s = best_interval_s(torch_s, torch_s, job.mtbf_s)
    return Advice(
        stall_call_s=CALL_S + staged_s,
        stall_step_s=stall_step_s,
        staged_s=staged_s,
        local_s=local_s,
        root_s=root_s,
        stages=stages | way,
        bottleneck=max(stages | way, key=lambda name: (stages | way)[name]),
        root_rate=job.nbytes / drain_s,
        interval_s=interval_s,
        interval_steps=ceil(interval_s / job.step_s) if job.step_s else None,
        lost_share=lost_share(job, stall_step_s, root_s, interval_s),
        drain_rate=job.node_bytes / (drain_s + interval_s - root_s),
        torch_s=torch_s,
        torch_interval_s=torch_interval_s,
        torch_lost_share=lost_share(job, torch_s, 0.0, torch_interval_s),
    )


def best_interval_s(stall_s: float, drain_s: float, mtbf_s: float) -> float:
    """Returns the interval that minimises lost_share(): Young's, sqrt(2 d M), for the stall, which
    is all that a checkpoint costs training (CACM 17(9), 1974); but at least the drain, since drains
    follow each other.
    """
    return max(sqrt(2 * stall_s * mtbf_s), drain_s, stall_s)


def lost_share(job: Job, stall_s: float, drain_s: float, interval_s: float) -> float:
    """Returns the share of all time that is lost to training: stall/interval + (interval/2 + drain
    + restart)/MTBF, at most 1.

    These are Young's two terms and two for writing in the background: a failure throws training
    back to the newest committed checkpoint, which on average was taken interval/2 + drain ago. The
    formula is of first order, for drain + interval well below the MTBF.
    """
    again_s = interval_s / 2 + drain_s + job.restart_s
    return min(1.0, stall_s / interval_s + again_s / job.mtbf_s)


class _Option(NamedTuple):
    """A command-line option for one input of a Job."""

    flag: str
    read: Any
    unit: str
    text: str


_RATE, _SIZE, _TIME = quantities.rate, quantities.size, quantities.time
_SHOWN: dict[Any, Any] = {_RATE: shown_rate, _SIZE: shown_size, _TIME: shown_time, int: str}
_OPTIONS = {
    "d2h_rate": _Option("--d2h", _RATE, "RATE", "from each GPU to pinned host memory"),
    "writer_rate": _Option("--writer", _RATE, "RATE", "written by one process"),
    "network_rate": _Option("--network", _RATE, "RATE", "from a node to the storage"),
    "osts": _Option("--osts", int, "N", "storage targets of the file system (lfs df)"),
    "ost_rate": _Option("--ost", _RATE, "RATE", "written to each storage target"),
    "nvme_rate": _Option(
        "--nvme", _RATE, "RATE", "of a node's local disks, which are written first"
    ),
    "staging_bytes": _Option("--staging", _SIZE, "SIZE", "host memory of a node for staging"),
    "step_s": _Option("--step-time", _TIME, "TIME", "duration of a training step"),
    "commit_s": _Option("--commit-time", _TIME, "TIME", "for agreement, syncs and renames"),
    "restart_s": _Option("--restart-time", _TIME, "TIME", "from a failure to the first new step"),
    "torch_rate": _Option("--torch", _RATE, "RATE", "of one torch.save, for comparison"),
    "torch_writers": _Option(
        "--torch-writers", int, "N", "processes that call torch.save in the comparison"
    ),
}


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="predict what checkpoints of a job cost, and how often to save one",
        description=(
            "Predicts with a model how long checkpoints stall training, when they are committed "
            "and how much time is lost (docs/project/scale.md). Write sizes like 4.3TiB or "
            "24GB, rates like 75GB/s, times like 3h, 5min or 20ms."
        ),
    )
    count, size = quantity_argument(quantities.count), quantity_argument(_SIZE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--params", type=count, metavar="N", help="number of parameters, such as 340e9"
    )
    what.add_argument("--size", type=size, help="total size of one checkpoint")
    parser.add_argument("--bytes-per-param", type=float, default=BYTES_PER_PARAMETER, metavar="N")
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of ranks of the job"
    )
    nodes = f"default: one for each {_GPUS_PER_NODE} GPUs"
    parser.add_argument("--nodes", type=int, metavar="N", help=nodes)
    failures = (
        "mean time between failures of the whole job; default: from the failure rate of Llama "
        "3's GPUs"
    )
    parser.add_argument("--mtbf", type=quantity_argument(_TIME), metavar="TIME", help=failures)
    defaults = {field.name: field.default for field in fields(Job)}
    for name, option in _OPTIONS.items():
        text = f"{option.text}; default: {_shown(name, defaults[name])}"
        read = quantity_argument(option.read)
        parser.add_argument(option.flag, dest=name, type=read, metavar=option.unit, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.set_defaults(error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    values = {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    size, nodes, mtbf_s = arguments.size, arguments.nodes, arguments.mtbf
    try:
        if arguments.gpus < 1:
            raise ValueError(f"gpus is {arguments.gpus}, must be above 0")
        job = Job(
            nbytes=arguments.params * arguments.bytes_per_param if size is None else size,
            ranks=arguments.gpus,
            nodes=-(-arguments.gpus // _GPUS_PER_NODE) if nodes is None else nodes,
            # Any failure of a GPU ends the job, and rates of independent failures add up.
            mtbf_s=3600 / (FAILURES_PER_GPU_HOUR * arguments.gpus) if mtbf_s is None else mtbf_s,
            **values,
        )
    except ValueError as error:
        arguments.error(str(error))
    if arguments.json:
        print(json.dumps({"inputs": asdict(job), "advice": asdict(advise(job))}, indent=2))
        return 0
    rows = [
        ("size of a checkpoint", shown_size(job.nbytes)),
        ("ranks, nodes", f"{job.ranks}, {job.nodes}"),
        ("time between failures", shown_time(job.mtbf_s)),
    ]
    for name, option in _OPTIONS.items():
        source = "given" if name in values else "assumed"
        text = f"{_shown(name, getattr(job, name))} ({source}, {option.flag})"
        rows.append((option.text, text))
    print("\n".join([*_lines("The job", rows), *_report(job, advise(job))]))
    return 0


def _shown(name: str, value: Any) -> str:
    return "unknown" if value is None else _SHOWN[_OPTIONS[name].read](value)


def _report(job: Job, found: Advice) -> list[str]:
    steps = f", {found.interval_steps} steps" if found.interval_steps is not None else ""
    local = "-" if found.local_s is None else shown_time(found.local_s)
    stages = ", ".join(f"{name} {shown_time(s)}" for name, s in found.stages.items() if s)
    return [
        *_lines(
            "A checkpoint",
            [
                ("training stands still, call fence", shown_time(found.stall_call_s)),
                ("training stands still, step fence", shown_time(found.stall_step_s)),
                ("copied to the host after", shown_time(found.staged_s)),
                ("committed on local disks after", local),
                ("committed on the storage after", shown_time(found.root_s)),
                ("  written at", shown_rate(found.root_rate)),
                ("  bottleneck", found.bottleneck),
                ("  each by itself", stages),
            ],
        ),
        *_lines(
            "What to do",
            [
                ("checkpoint every", f"{shown_time(found.interval_s)}{steps}"),
                ("time lost, with failures", _percent(found.lost_share)),
                ("slowest drain_rate that keeps up", f"{shown_rate(found.drain_rate)} a node"),
            ],
        ),
        *_lines(
            f"For comparison: torch.save by {job.torch_writers}, while training waits",
            [
                ("training stands still", shown_time(found.torch_s)),
                ("checkpoint every", shown_time(found.torch_interval_s)),
                ("time lost, with failures", _percent(found.torch_lost_share)),
            ],
        ),
    ]


def _percent(share: float) -> str:
    return "all of it: no progress" if share >= 1 else f"{100 * share:.2f} %"


def _lines(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return ["", title, *(f"  {name:{width}}  {text}" for name, text in rows)]
