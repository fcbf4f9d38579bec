"""What a user compares: ours beside torch's own, the best rival and what the machine can do.

It reads records and measures nothing. Ratios are of medians, so a reader can check them by the
tables; the bars of report.py take the ratios of single rounds.
"""

from __future__ import annotations

import re

from harness import Line, Row, median_of, number, spread_of, table
from report import OURS, by_peer
from rivals import PEERS
from rivals.fastckpt_save import Fastckpt

NAMES = {
    "torch.save": "torch.save",
    "torch.save-nocrc": "torch.save without its checksum",
    "safetensors": "safetensors",
    "fastsafetensors": "fastsafetensors",
    "runai-streamer": "Run:ai Model Streamer",
    "dcp": "DCP save",
    "dcp-async": "DCP async_save, default",
    "dcp-async-stager": "DCP async_save, stager",
    "dcp-async-pinned": "DCP async_save, pinned",
    "torchsnapshot": "torchsnapshot take",
    "torchsnapshot-async": "torchsnapshot async_take",
    "torch_checkpointing": "torch_checkpointing",
    "deepspeed": "DeepSpeed FastFileWriter",
    "fastckpt": "**fastckpt, call fence**",
    "fastckpt-step": "**fastckpt, step fence**",
}
CLOCKS = {"stall_s": "state may change", "durable_s": "durable", "load_s": "cold load"}
Best = tuple[str, float]  # who, and in how many seconds


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
        ["", "training is blocked for", "on the disk after", "load, nothing cached"], lines
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


def peers(result: Row) -> list[str]:
    """Return the table of saves and loads by peer, of those that follow others in a process."""
    groups, limits = by_peer(result["rows"]), result["limits"]
    clocks = ("returned_s", *CLOCKS)
    rows = [[NAMES[name], *(spread_of(its, key) for key in clocks)] for name, its in groups.items()]
    copied = spread_of(limits, "torch_copy_s")
    rows.append(["*limit:* Tensor.copy_", copied, copied, "-", "-"])
    for key, place in (("write", 3), ("read", 4)):
        if speed := median_of(limits, key):
            row = [f"*limit:* {result.get('limit', 'fio')}, {speed / 1e9:.2f} GB/s", *["-"] * 4]
            row[place] = number(result["bytes"] / speed)
            rows.append(row)
    heads = ["seconds", "call returns", *CLOCKS.values()]
    return [table(heads, rows)]


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


def line_of(record: Row, what: str) -> Line:
    """Return the line of a record that begins so."""
    sections = record["lines"]
    lines = (line for found in sections.values() for line in found)
    return next(Line(**line) for line in lines if line["what"].startswith(what))


def pair(record: Row, what: str) -> tuple[float, float]:
    """Return the seconds of ours and of theirs that a line has in brackets."""
    measured = line_of(record, what).measured
    found = re.search(r"\(([\d.]+) s; ([\d.]+) s\)", measured)
    assert found is not None, measured
    return float(found[1]), float(found[2])


def comparison(records: dict[str, Row]) -> str:
    """Return the user's table: ours, torch's own, the best rival, the machine's limit."""
    saves = records["saves"]["results"]["saves"]
    rows, limits = saves["rows"], saves["limits"]
    size = f"{saves['bytes'] / 2**30:.2g} GiB"
    limit = {"stall_s": ("Tensor.copy_", median_of(limits, "torch_copy_s"))}
    for key, kind in (("durable_s", "write"), ("load_s", "read")):
        speed = median_of(limits, kind)
        limit[key] = (f"fio {kind}", speed and saves["bytes"] / speed)
    found: list[list[str]] = []
    for key, head in CLOCKS.items():
        base = of_peer(rows, "torch.save", key)
        ours = of_peer(rows, Fastckpt.name, key)
        found.append(row_of(f"{size}: {head}", ours, base, best_rival(rows, key), limit[key]))
    many = records["many"]["results"]["many"]["rows"]
    for key, head in CLOCKS.items():
        what = f"many small tensors: {head}"
        its = [of_peer(many, name, key) for name in (Fastckpt.name, "torch.save")]
        found.append(row_of(what, its[0], its[1], best_rival(many, key)))
    small = records["training"]["results"]["small"]["seconds"]
    medians = {name: median_of([{"s": s} for s in its], "s") for name, its in small.items()}
    ours, base = medians["fastckpt"] or 0.0, medians["torch.save+fsync+rename+dir"] or 0.0
    found.append(row_of("1 MB in 256 tensors: durable", ours, base))
    dcp, name = records["dcp"], "DCP"
    for what, head in (
        ("async_save: stall", "DCP, two ranks: async_save returns"),
        ("async_save: committed", "DCP, two ranks: async_save durable"),
        ("dcp.load with Reader, its own: cold", "DCP, two ranks: cold load"),
    ):
        ours, theirs = pair(dcp, what)
        found.append(row_of(head, ours, None, (name, theirs)))
    ours, theirs = pair(records["export"], "committed, of HuggingFaceStorageWriter")
    rival = ("HuggingFaceStorageWriter", theirs)
    found.append(row_of("Hugging Face export, four ranks: durable", ours, None, rival))
    for head, what in (("durable", "committed"), ("read", "cold read into a model")):
        by_hand = {
            name: pair(records["weights"], f"{what}, of rank 0 writes {way}")
            for name, way in (("whole by safetensors", "the whole"), ("gaps and values", "gaps"))
        }
        rival = best_of({name: theirs for name, (_ours, theirs) in by_hand.items()})
        ours = by_hand["gaps and values"][0]
        found.append(row_of(f"1 GiB of weights, 3 % changed: {head}", ours, None, rival))
    for server in ("drain", "seaweedfs"):
        seconds = of_ways(records["objects"], server)
        heads = {"committed s": "save", "load s": "load"}
        for head in (head for head in heads if head in seconds):
            its = seconds[head]
            rival = ("DCP, s3torchconnector", its["dcp, s3torchconnector"])
            what = f"bucket ({server}): {heads[head]}"
            found.append(row_of(what, its["fastckpt"], None, rival, ("obstore", its["obstore"])))
    for title, ways in records["dlio"]["tables"].items():
        seconds = {row[0]: float(row[1].split()[0]) for row in cells_of(ways[0])[1:]}
        for act in ("write", "read"):
            its = [seconds[f"{act}, {name}"] for name in ("fastckpt", "torch.save")]
            found.append(row_of(f"DLIO {title.partition(':')[0]}: {act}", its[0], its[1]))
    gpu = records["gpu"]
    for head, name in (("copied s", "state may change"), ("durable s", "durable")):
        its = column(gpu, "commit", head)
        rival = (NAMES["dcp-async-pinned"], its["dcp-async-pinned"])
        found.append(row_of(f"H100, 2 GiB: {name}", its["fastckpt"], its["torch.save"], rival))
    its = column(gpu, "load", "s")
    rival = ("safetensors", its["safetensors"])
    found.append(row_of("H100, 2 GiB: cold load", its["fastckpt.load"], its["torch.load"], rival))
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
