"""`fastckpt advise`: predicts the cost of a job's checkpoints and recommends an interval.

Each formula names its source; docs/project/scale.md compares predictions with published
measurements. Modules that need torch are imported only when a prediction is made.
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

# Mixed precision with Adam: 2 bytes for the bf16 weight, and 4 bytes each for its fp32 copy and two
# moments (Rajbhandari et al., ZeRO, SC 2020, without the gradients).
BYTES_PER_PARAMETER = 14.0
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
CALL_S = 0.02  # a call without copies; README.md has 0.012 s for 2 GiB
_GPUS_PER_NODE = 8
_DAY_S = 86400.0


@dataclass(frozen=True)
class Job:
    """A training job and its machine, in bytes, bytes per second and seconds; see _OPTIONS. Raises
    ValueError if a number is not finite or not positive, or contradicts another one.
    """

    nbytes: float  # of one checkpoint, without replicas
    ranks: int  # one for each GPU; all of them write
    nodes: int
    mtbf_s: float  # of the whole job
    d2h_rate: float = 25e9  # PCIe 4 x16 in practice
    writer_rate: float = 2e9  # less than to a good disk
    network_rate: float = 6e9  # a Lustre client's at LUG 2024
    osts: int | None = None  # no limit
    ost_rate: float = 4e9  # like ALCF's Eagle: 650 GB/s with 160 targets
    nvme_rate: float | None = None  # checkpoints go straight to the storage
    staging_bytes: float | None = None  # enough for a node's part
    step_s: float = 0.0  # unknown, so no copy is assumed to overlap a step
    commit_s: float = 0.5
    restart_s: float = 300.0
    torch_rate: float = 0.7e9  # of the H100 in docs/project/measurements.md
    torch_writers: int = 1
    keep_last: int | None = None  # all checkpoints stay
    keep_every: int | None = None  # none beside keep_last
    keep_best: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name in ("step_s", "commit_s", "restart_s", "staging_bytes", "keep_best")
            if value is not None and not (
                isfinite(value) and value >= (0 if may_be_zero else 1e-9)
            ):
                least = "0 or more" if may_be_zero else "above 0"
                raise ValueError(f"{name} is {value}, must be finite and {least}")
        for name in ("nodes", "torch_writers"):
            if getattr(self, name) > self.ranks:
                message = (
                    f"{name} is {getattr(self, name)}, must be at most the number of ranks "
                    f"({self.ranks})"
                )
                raise ValueError(message)
        if self.keep_last is None and (self.keep_every or self.keep_best):
            raise ValueError("keep_every and keep_best need keep_last, as in a Checkpointer")

    @property
    def rank_bytes(self) -> float:
        """The bytes that each rank writes: ranks that hold the same tensor divide it evenly."""
        return self.nbytes / self.ranks

    @property
    def node_bytes(self) -> float:
        """The bytes that the node with the most ranks writes."""
        return self.rank_bytes * ceil(self.ranks / self.nodes)


@dataclass(frozen=True)
class Advice:
    """The prediction and the advice, in bytes per second and seconds."""

    stall_call_s: float  # the stall of training per checkpoint, with the call fence
    stall_step_s: float  # the same with the step fence
    staged_s: float  # until the copy to the host is complete
    local_s: float | None  # until the commit on the local disks, if any
    root_s: float  # until the commit on the storage
    stages: dict[str, float]  # the time of each resource alone, in the order of the bytes' path
    bottleneck: str
    root_rate: float  # the rate of all writers together, to the storage
    interval_s: float  # from one save() to the next, with the step fence
    interval_steps: int | None  # None if the time of a step is unknown
    lost_share: float  # the share of time that stalls and failures cost
    drain_rate: float  # per node: the lowest rate that ends before the next checkpoint
    torch_s: float  # the same for torch.save, while training waits
    torch_interval_s: float
    torch_lost_share: float
    disk_bytes: float | None  # of the kept checkpoints and the next; None: all are kept
    growth_bytes_per_day: float | None  # of those that stay; None if the time of a step is unknown


def advise(job: Job) -> Advice:
    """Returns the predicted cost of a job's checkpoints, and the recommended interval.

    The stages of a save run at the same time, block by block, so a save takes as long as the
    slowest stage. With local disks there are two saves in sequence: to the disks, then from the
    disks to the storage. The model ignores that saves may slow training down, and that other jobs
    use the storage.
    """
    from fastckpt.storage.lustre_layout import own_stripes

    def targets_s(files: int, stripes: int) -> float:
        """Returns the time that the storage targets take for `files` files with `stripes` stripes
        each.
        """
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
    # Copies fill staging memory B while writes empty it, so a part P is copied when P - B is
    # written.
    missing = max(0.0, job.node_bytes - (job.staging_bytes or 0)) / job.node_bytes * first_s
    waiting_s = 0.0 if job.staging_bytes is None else missing
    staged_s = max(stages["GPU-to-host copies"], waiting_s)
    local_s, root_s = None, max(staged_s, first_s) + job.commit_s
    if job.nvme_rate is not None:
        local_s, root_s = root_s, root_s + drain_s + job.commit_s
    stall_step_s = CALL_S + max(0.0, staged_s - job.step_s)
    interval_s = best_interval_s(stall_step_s, root_s, job.mtbf_s)
    # Each torch.save file is on one target, by Lustre's default.
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
        disk_bytes=job.keep_last and (job.keep_last + job.keep_best + 1) * job.nbytes,
        growth_bytes_per_day=_growth(job, interval_s),
    )


def _growth(job: Job, interval_s: float) -> float | None:
    """Returns how many bytes of checkpoints that are never removed are added in a day, at most."""
    if job.keep_last is None:
        return job.nbytes * _DAY_S / interval_s
    if job.keep_every is None:
        return 0.0
    return (
        job.nbytes * _DAY_S / max(interval_s, job.keep_every * job.step_s) if job.step_s else None
    )


def best_interval_s(stall_s: float, drain_s: float, mtbf_s: float) -> float:
    """Returns the interval that minimises lost_share(): Young's sqrt(2 d M) (CACM 17(9), 1974),
    where d is the stall, the only cost of a checkpoint for training; but at least the time of a
    drain, because drains run one after another.
    """
    return max(sqrt(2 * stall_s * mtbf_s), drain_s, stall_s)


def lost_share(job: Job, stall_s: float, drain_s: float, interval_s: float) -> float:
    """Returns the share of time that is lost for training: stall/interval + (interval/2 + drain +
    restart)/MTBF, at most 1.

    These are Young's two terms and two terms for background writes: after a failure, training
    restarts from the newest committed checkpoint, which on average was saved interval/2 + drain
    before. It is a first-order formula, valid if drain + interval is well below the MTBF.
    """
    again_s = interval_s / 2 + drain_s + job.restart_s
    return min(1.0, stall_s / interval_s + again_s / job.mtbf_s)


class _Option(NamedTuple):
    """A command-line option for one field of a Job."""

    flag: str
    read: Any
    unit: str
    text: str


_RATE, _SIZE, _TIME = quantities.rate, quantities.size, quantities.time
_SHOWN: dict[Any, Any] = {_RATE: shown_rate, _SIZE: shown_size, _TIME: shown_time, int: str}
_OPTIONS = {
    "d2h_rate": _Option("--d2h", _RATE, "RATE", "copies from each GPU to pinned host memory"),
    "writer_rate": _Option("--writer", _RATE, "RATE", "writes of one process"),
    "network_rate": _Option("--network", _RATE, "RATE", "network from a node to the storage"),
    "osts": _Option("--osts", int, "N", "storage targets of the file system (lfs df)"),
    "ost_rate": _Option("--ost", _RATE, "RATE", "writes to each storage target"),
    "nvme_rate": _Option("--nvme", _RATE, "RATE", "local disks of a node, which are written first"),
    "staging_bytes": _Option("--staging", _SIZE, "SIZE", "host memory of a node for staging"),
    "step_s": _Option("--step-time", _TIME, "TIME", "duration of a training step"),
    "commit_s": _Option("--commit-time", _TIME, "TIME", "agreement, syncs and renames of a commit"),
    "restart_s": _Option("--restart-time", _TIME, "TIME", "from a failure to the first new step"),
    "torch_rate": _Option("--torch", _RATE, "RATE", "writes of one torch.save, for comparison"),
    "torch_writers": _Option(
        "--torch-writers", int, "N", "processes that call torch.save in the comparison"
    ),
    "keep_last": _Option("--keep-last", int, "N", "newest checkpoints that stay"),
    "keep_every": _Option("--keep-every", int, "N", "steps whose multiples also stay"),
    "keep_best": _Option("--keep-best", int, "N", "best checkpoints that also stay"),
}


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="predict the cost of a job's checkpoints, and recommend an interval",
        description=(
            "Predicts with a model how long checkpoints block training, when they are committed "
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
        "mean time between failures of the whole job; default: derived from the failure rate of "
        "Llama 3's GPUs"
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
            # Any GPU failure ends the job, and the rates of independent failures add up.
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
    absent = {"keep_last": "all", "keep_every": "none"}.get(name, "unknown")
    return absent if value is None else _SHOWN[_OPTIONS[name].read](value)


def _report(job: Job, found: Advice) -> list[str]:
    steps = f", {found.interval_steps} steps" if found.interval_steps is not None else ""
    local = "-" if found.local_s is None else shown_time(found.local_s)
    stages = ", ".join(f"{name} {shown_time(s)}" for name, s in found.stages.items() if s)
    return [
        *_lines(
            "A checkpoint",
            [
                ("training is blocked, call fence", shown_time(found.stall_call_s)),
                ("training is blocked, step fence", shown_time(found.stall_step_s)),
                ("copied to the host after", shown_time(found.staged_s)),
                ("committed on local disks after", local),
                ("committed on the storage after", shown_time(found.root_s)),
                ("  written at", shown_rate(found.root_rate)),
                ("  bottleneck", found.bottleneck),
                ("  each stage alone", stages),
            ],
        ),
        *_lines(
            "Recommendation",
            [
                ("checkpoint every", f"{shown_time(found.interval_s)}{steps}"),
                ("time lost, including failures", _percent(found.lost_share)),
                ("slowest drain_rate that keeps up", f"{shown_rate(found.drain_rate)} a node"),
            ],
        ),
        *_lines("Disk space of the checkpoints", _disk(job, found)),
        *_lines(
            f"For comparison: torch.save by {job.torch_writers}, while training waits",
            [
                ("training is blocked", shown_time(found.torch_s)),
                ("checkpoint every", shown_time(found.torch_interval_s)),
                ("time lost, including failures", _percent(found.torch_lost_share)),
            ],
        ),
    ]


def _disk(job: Job, found: Advice) -> list[tuple[str, str]]:
    grows = found.growth_bytes_per_day
    if job.keep_last is None or found.disk_bytes is None:
        return [("all stay, without keep_last", f"grows by {shown_size(grows or 0)} a day")]
    policy = f"{job.keep_last} newest" + (f", {job.keep_best} best" if job.keep_best else "")
    rows = [(f"{policy}, and the one being written", shown_size(found.disk_bytes))]
    if grows is None:
        text = f"grows by {shown_size(job.nbytes)} every {job.keep_every} steps"
        rows.append(("those of keep_every", f"{text} (give --step-time for a day)"))
    elif grows:
        rows.append(("those of keep_every", f"grows by at most {shown_size(grows)} a day"))
    return rows


def _percent(share: float) -> str:
    return "all of it, so no progress" if share >= 1 else f"{100 * share:.2f} %"


def _lines(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return ["", title, *(f"  {name:{width}}  {text}" for name, text in rows)]
