"""What a user compares: ours beside torch's own, the best rival and what the machine can do.

It reads records and measures nothing. Ratios are of medians, so a reader can check them by the
tables; the bars of report.py take the ratios of single rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from ceiling import LIMIT, LIMITS
from harness import Rounds, Row, median_of, number, spread_of, table
from report import CLOCKS, NAMES, OURS, SMALL_BASE, SMALL_LIMIT, by_peer, limits_of
from rivals import PEERS
from rivals.fastckpt_save import Fastckpt
from rivals.torchft_transport import WAYS

Best = tuple[str, float]  # who, and in how many seconds
Rivals = dict[str, str]  # with their names in a record
CHANGED = "1 GiB of weights, 3 % changed"
DCP: Rivals = {"DCP": "torch async"}
LOAD: Rivals = {"DCP": "torch loads torch's"}
DURABLE = ("committed_s", DCP, "written_s")
TORCHFT: Rivals = {way: way for way in WAYS[1:]}
HAND: Rivals = {"whole by safetensors": "whole", "gaps and values": "gaps"}
READ_BY_HAND = {rival: f"read {name}" for rival, name in HAND.items()}
HF: Rivals = {"HuggingFaceStorageWriter": "torch"}


def best_of(medians: dict[str, float | None]) -> Best:
    """Return the fastest of those that have a value."""
    known = {name: value for name, value in medians.items() if value}
    name = min(known, key=lambda name: known[name])
    return NAMES.get(name, name), known[name]


def best_rival(rows: list[Row], key: str) -> Best:
    """Return the fastest of what is neither ours nor torch.save's."""
    groups = {n: its for n, its in by_peer(rows).items() if not n.startswith((*OURS, "torch.save"))}
    return best_of({name: median_of(its, key) for name, its in groups.items()})


def of_peer(rows: list[Row], name: str, key: str) -> float:
    """Return the median of one peer."""
    value = median_of(by_peer(rows)[name], key)
    assert value is not None
    return value


def gain(
    machine: str, ours: list[float], torchs: list[float], rivals: list[Best]
) -> list[list[str]]:
    """Return the rows of one machine: our seconds, and how often as long the others take."""
    seconds = [f"{value:#.2g} s" for value in ours]
    base = [f"{theirs / mine:.2g} x" for mine, theirs in zip(ours, torchs, strict=True)]
    best = [f"{its[1] / mine:.2g} x ({its[0]})" for mine, its in zip(ours, rivals, strict=True)]
    return [
        [f"**fastckpt**, {machine}", *(f"**{value}**" for value in seconds)],
        ["torch.save, torch.load", *base],
        ["fastest other library", *best],
    ]


def gains(saves: Row, gpu: Row) -> str:
    """Return the table of the README."""
    rows = saves["results"]["saves"]["rows"]
    ours, base = (
        [of_peer(rows, it, key) for key in CLOCKS] for it in (Fastckpt.name, "torch.save")
    )
    size = saves["results"]["saves"]["bytes"] / 2**30
    rivals = [best_rival(rows, key) for key in CLOCKS]
    lines = gain(f"{size:.2g} GiB, two CPU cores", ours, base, rivals)
    copied, durable = (column(gpu, "commit", head) for head in ("copied s", "durable s"))
    loads = column(gpu, "load", "s")
    lines += gain(
        "2 GiB, one H100",
        [copied["fastckpt"], durable["fastckpt"], loads["fastckpt.load"]],
        [copied["torch.save"], durable["torch.save"], loads["torch.load"]],
        [("DCP, pinned", its["dcp-async-pinned"]) for its in (copied, durable)]
        + [("safetensors", loads["safetensors"])],
    )
    return table(
        ["", "the state may change after", "on the disk after", "load, nothing cached"], lines
    )


def column(record: Row, name: str, head: str) -> dict[str, float]:
    """Return one column of a table of a record, by the first column."""
    heads, *rows = cells_of(record["tables"][name][0])
    return {row[0]: float(row[heads.index(head)]) for row in rows}


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of a table of Markdown, its heads first."""
    heads, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()
    )
    return [heads, *rows]


def details(saves: Row) -> str:
    """Return the first save and load of a process by peer, and how each peer saves."""
    contracts = {kind.name: kind.contract for kind in PEERS}
    rows = []
    for name, its in by_peer(saves["results"]["saves"]["rows"]).items():
        first = [each["warm_ups"][0] for each in its if each.get("warm_ups")]
        cells = (spread_of(first, key) for key in CLOCKS)
        rows.append([NAMES[name], *cells, contracts[name]])
    heads = ["first of a process, seconds", *CLOCKS.values(), "how it saves"]
    return table(heads, rows)


# What ranks and processes have measured: record, what it is called, the name of ours, the clock,
# the rivals with their names in the record, and the clock of the limit.
RANKS: tuple[tuple[str, str, str, str, Rivals, str], ...] = (
    ("dcp", "DCP, two ranks: async_save returns", "fastckpt async", "stall_s", DCP, "copied_s"),
    ("dcp", "DCP, two ranks: async_save durable", "fastckpt async", *DURABLE),
    ("dcp", "DCP, two ranks: cold load", "fastckpt loads its own", "loaded_s", LOAD, "read_s"),
    ("dcp-tmpfs", "DCP, two ranks, tmpfs: async_save is done", "fastckpt async", *DURABLE),
    (
        "export",
        "Hugging Face export, four ranks: durable",
        "export",
        "committed_s",
        HF,
        "written_s",
    ),
    ("weights", f"{CHANGED}: durable", "publish", "committed_s", HAND, "encoded_s"),
    ("weights", f"{CHANGED}: read", "read publish", "read_s", READ_BY_HAND, ""),
    ("healing", "torchft, 1 GiB: healed", "fastckpt", "healed_s", TORCHFT, "socket_s"),
    ("healing", "torchft, 1 GiB: step blocked", "fastckpt", "blocked_s", TORCHFT, ""),
)


def of_saves(record: Row, kind: str, what: str, keys: Sequence[str]) -> list[list[str]]:
    """Return the rows of saves by one process."""
    result = record["results"][kind]
    rows, limits = result["rows"], limits_of(result)
    found = []
    for key in keys:
        ours, base = (of_peer(rows, name, key) for name in (Fastckpt.name, "torch.save"))
        limit = named(*limits[key])
        found.append(row_of(f"{what}: {CLOCKS[key]}", ours, base, best_rival(rows, key), limit))
    return found


def of_ranks(record: Row, what: str, ours: str, key: str, rivals: Rivals, limit: str) -> list[str]:
    """Return the row of one clock of a benchmark whose rows have names."""

    def of(name: str, key: str) -> float | None:
        return median_of([row for row in record["results"] if row["name"] == name], key)

    mine, theirs = of(ours, key), {rival: of(name, key) for rival, name in rivals.items()}
    assert mine is not None, what
    best = (LIMITS[limit], of(LIMIT, limit)) if limit else None
    return row_of(what, mine, None, best_of(theirs), best)


def named(name: str, rounds: Rounds) -> tuple[str, float | None]:
    """Return the median of a limit."""
    return name, median_of([{"s": value} for value in rounds.values()], "s")


def of_small(result: Row) -> list[str]:
    """Return the row of small saves."""
    medians = {name: median_of([{"s": s} for s in its], "s") for name, its in result.items()}
    limit = ("write and fsync", medians.get(SMALL_LIMIT))
    ours = medians[Fastckpt.name] or 0.0
    return row_of("1 MB in 256 tensors: durable", ours, medians[SMALL_BASE], None, limit)


def of_dlio(tables: Row) -> list[list[str]]:
    """Return the rows of DLIO."""
    found = []
    for title, ways in tables.items():
        seconds = {row[0]: float(row[1].split()[0]) for row in cells_of(ways[0])[1:]}
        for act in ("write", "read"):
            ours, base = (seconds[f"{act}, {name}"] for name in ("fastckpt", "torch.save"))
            limit = (f"fio {act}", seconds.get(f"{act}, fio"))
            what = f"DLIO {title.partition(':')[0]}: {act}"
            found.append(row_of(what, ours, base, None, limit))
    return found


def of_gpu(gpu: Row) -> list[list[str]]:
    """Return the rows of saves from a GPU to a disk."""
    found, commit = [], gpu["results"]["commit"]
    nbytes = commit["rows"][0]["file_bytes"]

    def limit(rows: list[Row], act: str) -> tuple[str, float]:
        rate = median_of(rows, f"{act}_bps")
        assert rate is not None
        return f"fastckpt bench io {act}", nbytes / rate

    for head, name in (("copied s", "state may change"), ("durable s", "durable")):
        its = column(gpu, "commit", head)
        rival = (NAMES["dcp-async-pinned"], its["dcp-async-pinned"])
        best = limit(commit["disk"], "write") if name == "durable" else None
        what = f"H100, 2 GiB: {name}"
        found.append(row_of(what, its["fastckpt"], its["torch.save"], rival, best))
    its, best = column(gpu, "load", "s"), limit(gpu["results"]["load"]["limits"], "read")
    rival, ours = ("safetensors", its["safetensors"]), its["fastckpt.load"]
    return [*found, row_of("H100, 2 GiB: cold load", ours, its["torch.load"], rival, best)]


def comparison(records: dict[str, Row]) -> str:
    """Return the user's table: ours, torch's own, the best rival, the machine's limit. A benchmark
    without a record has no row.
    """
    saves = records["saves"]["results"]["saves"]
    found = of_saves(records["saves"], "saves", f"{saves['bytes'] / 2**30:.2g} GiB", [*CLOCKS])
    if "tmpfs" in records:
        size = records["tmpfs"]["results"]["saves"]["bytes"] / 2**30
        found += of_saves(records["tmpfs"], "saves", f"{size:.2g} GiB, tmpfs", ["durable_s"])
    if "many" in records:
        found += of_saves(records["many"], "many", "many small tensors", [*CLOCKS])
    if "training" in records:
        found.append(of_small(records["training"]["results"]["small"]["seconds"]))
    found += [of_ranks(records[name], *told) for name, *told in RANKS if name in records]
    for server in ("drain", "seaweedfs") if "objects" in records else ():
        seconds = of_ways(records["objects"], server)
        heads = {"committed s": "save", "load s": "load"}
        for head in (head for head in heads if head in seconds):
            its = seconds[head]
            rival = ("DCP, s3torchconnector", its["dcp, s3torchconnector"])
            what = f"bucket ({server}): {heads[head]}"
            found.append(row_of(what, its["fastckpt"], None, rival, ("obstore", its["obstore"])))
    found += of_dlio(records["dlio"]["tables"]) if "dlio" in records else []
    found += of_gpu(records["gpu"])
    heads = ["seconds", "fastckpt", "torch.save, torch.load", "best rival", "limit of the machine"]
    return table([*heads, "fastest"], found)


def row_of(
    what: str,
    ours: float,
    base: float | None,
    rival: Best | None = None,
    limit: tuple[str, float | None] | None = None,
) -> list[str]:
    """Return a row of the comparison, with who is the fastest."""
    others = {"torch": base, rival[0] if rival else "": rival[1] if rival else None}
    name, seconds = best_of(others)
    fastest = "fastckpt" if ours <= seconds else f"**{name}**"
    named = [f"{each[1]:.3f}, {each[0]}" if each and each[1] else "-" for each in (rival, limit)]
    return [what, f"{ours:.3f}", number(base), *named, fastest]


def of_ways(record: Row, server: str) -> dict[str, dict[str, float]]:
    """Return the medians of the table of an object store: by head, by way."""
    heads, *rows = cells_of(record["tables"][server][0])
    return {
        head: {row[0]: float(row[place].split()[0]) for row in rows}
        for place, head in enumerate(heads)
        if place
    }
