"""A model of the machine that predicts what checkpoints of a job cost, and how to take them.

Each formula names its source; docs/scale.md compares predictions with published measurements. The
module must not know files, where an input is from, or how results are shown; and it imports what
imports torch only when it is asked, for the command line's arguments have defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from math import ceil, floor, isfinite, log10, sqrt

BYTES_PER_PARAMETER = 14.0
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
CALL_S = 0.02  # a call that copies nothing; README.md has 0.012 s for 2 GiB

COPIES = "GPU-to-host copies"
STAGING = "staging memory"
NVME = "local NVMe"
WRITERS = "writing processes"
NETWORK = "network of the nodes"
TARGETS = "storage targets"


@dataclass(frozen=True)
class Job:
    """A training job and its machine. Rates are in bytes per second, times in seconds.

    Args:
        nbytes: the size of one checkpoint, without replicas; state_bytes() estimates it.
        ranks: the number of processes, one for each GPU. All of them write.
        nodes: the number of machines that they run on.
        mtbf_s: the mean time between failures of the whole job; mtbf_s() estimates it.
        d2h_rate: from each GPU to pinned host memory. Default: 25 GB/s, PCIe 4 x16 in practice.
        writer_rate: of one process to the storage. Default: 2 GB/s, less than to a good disk.
        network_rate: from a node to the storage. Default: 6 GB/s, a Lustre client's at LUG 2024.
        osts: the number of storage targets (OSTs); None: not known, taken as no limit.
        ost_rate: to each target. Default: 4 GB/s, as ALCF's Eagle (650 GB/s by 160 targets).
        nvme_rate: from a node to its local disks, to which checkpoints go first, and from there to
            the storage; None: they go straight to the storage.
        staging_bytes: the memory a node has for staging; None: as much as its part of the state.
        step_s: the time of a training step; 0: not known, so no copy counts as hidden by one.
        commit_s: for agreement of the ranks, syncs and renames in one commit, whatever its size.
        restart_s: from a failure to the first new step, without the work that is done again.
        torch_rate: of one torch.save, to compare with. Default: 0.7 GB/s, docs/benchmarks.md.
        few_writers: the number of writers in the comparison; None: one for each node.

    Raises:
        ValueError: a number is not finite, not positive, or contradicts the others.
    """

    nbytes: float
    ranks: int
    nodes: int
    mtbf_s: float
    d2h_rate: float = 25e9
    writer_rate: float = 2e9
    network_rate: float = 6e9
    osts: int | None = None
    ost_rate: float = 4e9
    nvme_rate: float | None = None
    staging_bytes: float | None = None
    step_s: float = 0.0
    commit_s: float = 0.5
    restart_s: float = 300.0
    torch_rate: float = 0.7e9
    few_writers: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}, must be a number")
            if name == "mtbf_s" and value == float("inf"):
                raise ValueError("mtbf_s is inf: a job that never fails needs no checkpoint")
            if not isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ValueError(f"{name} is {value}, must be finite and {least}")
            if name in _COUNTS and value != int(value):
                raise ValueError(f"{name} is {value}, must be a whole number")
        if self.nodes > self.ranks:
            raise ValueError(f"nodes is {self.nodes}, more than there are ranks ({self.ranks})")
        if self.few_writers is not None and self.few_writers > self.ranks:
            told = f"but there are only {self.ranks} ranks"
            raise ValueError(f"few_writers is {self.few_writers}, {told}")

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on the node that has most."""
        return ceil(self.ranks / self.nodes)

    @property
    def rank_bytes(self) -> float:
        """The part of one rank: ranks that hold the same tensor divide it evenly."""
        return self.nbytes / self.ranks

    @property
    def node_bytes(self) -> float:
        """The part of the node that has most ranks."""
        return self.rank_bytes * self.ranks_per_node


_MAY_BE_NONE = {"osts", "nvme_rate", "staging_bytes", "few_writers"}
_MAY_BE_ZERO = {"step_s", "commit_s", "restart_s", "staging_bytes"}
_COUNTS = {"ranks", "nodes", "osts", "few_writers"}


@dataclass(frozen=True)
class BlockingSave:
    """A checkpoint by torch.save, while training waits.

    Attributes:
        writers: the number of processes that write, each a file on one storage target.
        seconds: how long it takes, and training waits.
        interval_s: the best interval between two checkpoints (Daly).
        lost_share: the share of all time that is lost at that interval.
    """

    writers: int
    seconds: float
    interval_s: float
    lost_share: float


@dataclass(frozen=True)
class Advice:
    """What to expect and what to do. Rates are in bytes per second, times in seconds.

    Attributes:
        stall_call_s, stall_step_s: how long training waits for a checkpoint with the call fence and
            with the step fence.
        stall_bottleneck: the cause of most of that wait, COPIES or STAGING.
        fence: "step" if that stalls less, else "call". The interval is for this one.
        staged_s: when everything has been copied to the host.
        local_s: when the checkpoint is committed on the local disks; None without them.
        root_s: when it is committed on the storage.
        bottleneck: the resource that takes longest.
        stages: how long each resource takes by itself, in the order in which bytes pass them.
        root_rate: the rate of all writers together, to the storage.
        file_stripes: storage targets for the file of each rank, in stripes of file_stripe_bytes.
        shared_stripes: those for one file that all ranks write, in stripes of shared_stripe_bytes.
        shared_root_s: root_s with such a file.
        writers_per_node: the fewest writers of a node that are as fast as all.
        writers: the same for all nodes together.
        interval_s: the time from one save() to the next.
        interval_steps: the same in training steps, rounded up; None if step_s is not known.
        lost_share: the share of all time that stalls and failures cost at this interval.
        pace_rate: the lowest rate at which a node is done with writing to the storage in time for
            the next checkpoint.
        paced_lost_share: lost_share at that rate: failures cost more if checkpoints commit later.
        torch_one, torch_few: checkpoints by torch.save, by one writer and by few.
    """

    stall_call_s: float
    stall_step_s: float
    stall_bottleneck: str
    fence: str
    staged_s: float
    local_s: float | None
    root_s: float
    bottleneck: str
    stages: dict[str, float]
    root_rate: float
    file_stripes: int
    file_stripe_bytes: int
    shared_stripes: int
    shared_stripe_bytes: int
    shared_root_s: float
    writers_per_node: int
    writers: int
    interval_s: float
    interval_steps: int | None
    lost_share: float
    pace_rate: float
    paced_lost_share: float
    torch_one: BlockingSave
    torch_few: BlockingSave


def advise(job: Job) -> Advice:
    """Returns what checkpoints of a job will cost, and how to take them.

    The stages of a save run at the same time, block by block, so it takes as long as the slowest.
    With local disks one save follows the other: to the disks, and from there to the storage. The
    model leaves out that training may be slower meanwhile, and that others use the storage, too.
    """
    stages = _stages(job)
    to_root = max(stages[name] for name in (WRITERS, NETWORK, TARGETS))
    to_first = to_root if job.nvme_rate is None else max(stages[WRITERS], stages[NVME])
    waiting_s = staging_wait_s(job, to_first)
    staged_s = max(stages[COPIES], waiting_s)
    if job.nvme_rate is None:
        local_s, root_s = None, max(staged_s, to_root) + job.commit_s
    else:
        local_s = max(staged_s, to_first) + job.commit_s
        root_s = local_s + to_root + job.commit_s
    stall_call_s = CALL_S + staged_s
    stall_step_s = CALL_S + max(0.0, staged_s - job.step_s)
    stall_s = min(stall_call_s, stall_step_s)
    interval_s = best_interval_s(stall_s, root_s, job.mtbf_s)
    paced_s = max(root_s, interval_s)
    losses = (interval_s, job.mtbf_s, job.restart_s)
    stripes, stripe_bytes = shared_striping(job)
    shared_to_root = max(stages[WRITERS], stages[NETWORK], _targets_s(job, stripes))
    writers_per_node = fewest_writers(job)
    return Advice(
        stall_call_s=stall_call_s,
        stall_step_s=stall_step_s,
        stall_bottleneck=STAGING if waiting_s > stages[COPIES] else COPIES,
        fence="step" if stall_step_s < stall_call_s else "call",
        staged_s=staged_s,
        local_s=local_s,
        root_s=root_s,
        bottleneck=max(stages, key=lambda name: stages[name]),
        stages=stages,
        root_rate=job.nbytes / to_root,
        file_stripes=file_stripes(job.rank_bytes, job.osts),
        file_stripe_bytes=8 << 20,
        shared_stripes=stripes,
        shared_stripe_bytes=stripe_bytes,
        shared_root_s=root_s - to_root + max(to_root, shared_to_root),
        writers_per_node=writers_per_node,
        writers=min(job.ranks, writers_per_node * job.nodes),
        interval_s=interval_s,
        interval_steps=ceil(interval_s / job.step_s) if job.step_s else None,
        lost_share=lost_share(stall_s, root_s, *losses),
        pace_rate=job.node_bytes / (paced_s - (root_s - to_root)),
        paced_lost_share=lost_share(stall_s, paced_s, *losses),
        torch_one=blocking(job, 1),
        torch_few=blocking(job, job.few_writers or job.nodes),
    )


def arguments(job: Job, advised: Advice) -> dict[str, float]:
    """Returns arguments of Checkpointer that spare the storage without delaying checkpoints; others
    are best left at their defaults. The drain_rate has two digits, rounded up.
    """
    from fastckpt import Checkpointer

    found: dict[str, float] = {}
    if advised.writers < job.ranks:
        found["max_writers"] = advised.writers
    if advised.pace_rate < advised.root_rate / job.nodes:
        digit = 10 ** (floor(log10(advised.pace_rate)) - 1)
        found["drain_rate"] = float(ceil(advised.pace_rate / digit) * digit)
        if 2 * advised.interval_s > signature(Checkpointer).parameters["timeout_s"].default:
            found["timeout_s"] = float(ceil(2 * advised.interval_s))
    return found


def state_bytes(parameters: float, bytes_per_parameter: float = BYTES_PER_PARAMETER) -> float:
    """Returns the size of a checkpoint of a model with its optimizer.

    The default is mixed precision with Adam: 2 bytes for the bf16 weight, and 4 each for its fp32
    copy and two moments (Rajbhandari et al., ZeRO, SC 2020, without the gradients).
    """
    return parameters * bytes_per_parameter


def mtbf_s(ranks: int, failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR) -> float:
    """Returns the mean time between failures of a job that any failure of a GPU ends, since the
    rates of independent failures add up. The default rate is Llama 3's.
    """
    if not failures_per_gpu_hour > 0 or not ranks > 0:
        raise ValueError(f"{ranks} ranks with {failures_per_gpu_hour} failures an hour: no MTBF")
    return 3600.0 / (failures_per_gpu_hour * ranks)


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Returns the interval sqrt(2 d M), which minimises d/t + t/2M (Young, CACM 17(9), 1974)."""
    return sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Returns the same to a higher order, for d that are not small beside M (Daly, FGCS 22(3),
    2006, equation 37): the time between two checkpoints, without the checkpoint itself.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = sqrt(stall_s / (2 * mtbf_s))
    return sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - stall_s


def best_interval_s(stall_s: float, drain_s: float, mtbf_s: float) -> float:
    """Returns the interval that minimises lost_share(): Young's for the stall, which is all that a
    checkpoint costs training; but at least the drain, since drains follow each other.
    """
    return max(young_interval_s(stall_s, mtbf_s), drain_s, stall_s)


def lost_share(
    stall_s: float, drain_s: float, interval_s: float, mtbf_s: float, restart_s: float
) -> float:
    """Returns the share of all time that is lost to training: stall/interval + (interval/2 + drain
    + restart)/MTBF, at most 1.

    These are Young's two terms and two for writing in the background: a failure throws training
    back to the newest committed checkpoint, which on average was taken interval/2 + drain ago. The
    formula is of first order, for drain + interval well below the MTBF.
    """
    return min(1.0, stall_s / interval_s + (interval_s / 2 + drain_s + restart_s) / mtbf_s)


def staging_wait_s(job: Job, drain_s: float) -> float:
    """Returns when a state of size S is copied if staging memory B is smaller; 0 if B holds it.

    Copying at rate d fills B while writing at w < d empties it, so all of S is copied at the time
    t for which S = B + w t.
    """
    if job.staging_bytes is None:
        return 0.0
    missing = max(0.0, job.node_bytes - job.staging_bytes)
    return missing / job.node_bytes * drain_s


def file_stripes(file_bytes: float, osts: int | None) -> int:
    """Returns the number of storage targets for a large file that one process writes.

    That is between the Lustre wiki's 4 to 8 for large files of one client and NERSC's default of
    one: a target is faster than a process, but one alone may be full or slow.
    """
    from fastckpt.storage import lustre_layout

    return lustre_layout.own_stripes(int(file_bytes), osts)


def shared_striping(job: Job) -> tuple[int, int]:
    """Returns the number and the size of stripes for one file that all ranks write.

    That is up to 48 targets with stripes of 8 to 32 MiB (ALCF, for Theta's 56), larger if the part
    of a rank is: each rank then has whole stripes of its own, and waits for no lock of another.
    """
    from fastckpt.storage import lustre_layout

    return lustre_layout.shared_striping(int(job.nbytes), int(job.ranks), job.osts)


def fewest_writers(job: Job) -> int:
    """Returns the fewest processes of a node that write as fast as all of them would."""
    best_s = _writing_s(job, job.ranks_per_node)
    low, high = 1, job.ranks_per_node
    while low < high:  # fewer writers are never faster
        middle = (low + high) // 2
        if _writing_s(job, middle) <= best_s * (1 + 1e-9):
            high = middle
        else:
            low = middle + 1
    return low


def blocking(job: Job, writers: int) -> BlockingSave:
    """Returns the cost of a checkpoint by so many processes that call torch.save, spread over the
    nodes, while all others wait; each file is on one storage target, which is Lustre's default.
    """
    rate = min(writers * job.torch_rate, min(writers, job.nodes) * job.network_rate)
    if job.osts is not None:
        rate = min(rate, min(writers, job.osts) * job.ost_rate)
    seconds = job.nbytes / rate
    interval_s = daly_interval_s(seconds, job.mtbf_s) + seconds
    losses = (interval_s, job.mtbf_s, job.restart_s)
    return BlockingSave(writers, seconds, interval_s, lost_share(seconds, 0.0, *losses))


def _stages(job: Job) -> dict[str, float]:
    """Returns how long each resource takes for its part, if nothing else holds it up."""
    stages = {COPIES: job.rank_bytes / job.d2h_rate}
    if job.nvme_rate is not None:
        stages[NVME] = job.node_bytes / job.nvme_rate
    stages[WRITERS] = job.rank_bytes / job.writer_rate
    stages[NETWORK] = job.node_bytes / job.network_rate
    stages[TARGETS] = _targets_s(job, job.ranks * file_stripes(job.rank_bytes, job.osts))
    return stages


def _targets_s(job: Job, stripes: int) -> float:
    """Returns how long the storage targets take if all files together have so many stripes."""
    if job.osts is None:
        return 0.0
    return job.nbytes / (min(job.osts, stripes) * job.ost_rate)


def _writing_s(job: Job, writers_per_node: int) -> float:
    """Returns how long so many processes of each node take to write to the storage."""
    file_bytes = job.node_bytes / writers_per_node
    # Stripes as for the files of all ranks. Larger files would have more, and then fewer writers
    # would never be slower.
    stripes = job.nodes * writers_per_node * file_stripes(job.rank_bytes, job.osts)
    return max(
        file_bytes / job.writer_rate, job.node_bytes / job.network_rate, _targets_s(job, stripes)
    )
