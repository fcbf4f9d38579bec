"""What is written down of a run: its surroundings, medians, a Markdown table, charts, JSON.

It only reads the rows that the workloads returned. It must not measure anything.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rivals import BASELINE, PEERS

Row = dict[str, Any]
HIDDEN_OPTIONS = ("--dir", "--out")
OURS = "#c2410c"
OTHERS = "#64748b"
LIMIT = "#0f766e"


def cpu_model() -> str:
    """Return the processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def mount_of(directory: Path) -> dict[str, str]:
    """Return the file system and mount options that hold `directory`."""
    best = ("", "", "")
    resolved = directory.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if resolved.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, options)
    return {"filesystem": best[1], "mount_options": best[2]}


def arguments_without_paths(argv: list[str]) -> list[str]:
    """Return the command line with the values of path options left out."""
    shown, hide = [], False
    for word in argv:
        name, _, value = word.partition("=")
        shown.append("..." if hide else f"{name}=..." if value and name in HIDDEN_OPTIONS else word)
        hide = word in HIDDEN_OPTIONS
    return shown


def git_commit() -> str:
    """Return the commit this file stands in, marked when the tree differs from it."""
    here = Path(__file__).resolve().parent
    try:
        commit, dirty = (
            subprocess.run(
                ["git", *words], cwd=here, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with local changes" if dirty else "")


def environment(directory: Path, argv: list[str]) -> Row:
    """Return what a reader needs to judge or repeat the run."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * page,
        "kernel": platform.release(),
        **mount_of(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "argv": arguments_without_paths(argv),
    }


def median_of(rows: list[Row], key: str) -> float | None:
    """Return the median of one column, None where no row has it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def measured(rows: list[Row]) -> list[Row]:
    """Return the rows of what did not fail."""
    return [row for row in rows if "error" not in row]


def failures(results: Row) -> list[str]:
    """Name everything that failed or loaded wrong bytes, with the reason."""
    found: dict[str, None] = {}
    for section, result in results.items():
        for row in result.get("rows", []):
            if "error" in row:
                found[f"{row['peer']} ({section}): {row['error']}"] = None
            elif row.get("wrong_tensors"):
                found[f"{row['peer']} ({section}): loaded wrong bytes"] = None
            elif row.get("within_bar") is False:
                found[f"{row['peer']} ({section}): above its memory bar"] = None
    return list(found)


def by_peer(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by peer, in the order the peers are declared."""
    groups: dict[str, list[Row]] = {}
    for row in measured(rows):
        groups.setdefault(row["peer"], []).append(row)
    order = {kind.name: place for place, kind in enumerate(PEERS)}
    return dict(sorted(groups.items(), key=lambda item: order.get(item[0], len(order))))


def paired(rows: list[Row], key: str, reference: dict[int, float]) -> float | None:
    """Return the median over rounds of (the round's reference / this row's value)."""
    ratios = [
        reference[row["round"]] / row[key]
        for row in rows
        if row.get(key) and row["round"] in reference
    ]
    return statistics.median(ratios) if ratios else None


def summarize_saves(result: Row) -> Row:
    """Return each peer's medians and its paired ratios against torch.save and fio."""
    groups = by_peer(result["rows"])
    nbytes = result["bytes"]
    base = groups.get(BASELINE, [])
    base_durable = {row["round"]: row["durable_s"] for row in base}
    base_stall = {row["round"]: row["stall_s"] for row in base}
    base_load = {row["round"]: row["load_s"] for row in base if "load_s" in row}
    limits = result["limits"]
    fio_write = {row["round"]: nbytes / row["write"] for row in limits if row.get("write")}
    fio_read = {
        row["round"]: nbytes / max(row["read_direct"], row["read_buffered"])
        for row in limits
        if row.get("read_direct") or row.get("read_buffered")
    }
    peers = {}
    for name, rows in groups.items():
        peers[name] = {
            **{key: median_of(rows, key) for key in ("returned_s", "stall_s", "durable_s")},
            "load_s": median_of(rows, "load_s"),
            "stall_speedup": paired(rows, "stall_s", base_stall),
            "durable_speedup": paired(rows, "durable_s", base_durable),
            "load_speedup": paired(rows, "load_s", base_load),
            "write_of_fio": paired(rows, "durable_s", fio_write),
            "read_of_fio": paired(rows, "load_s", fio_read),
            "all_bytes_right": not any(row.get("wrong_tensors") for row in rows),
        }
    keys = ("memmove_s", "torch_copy_s", "write", "read_direct", "read_buffered")
    return {"peers": peers, "limits": {key: median_of(limits, key) for key in keys}}


def summarize_drag(result: Row) -> Row:
    """Return each peer's medians of the drag workload."""
    keys = ("lost_s", "stall_s", "quiet_step_s", "flushing_step_s", "steps_flushing")
    return {
        name: {key: median_of(rows, key) for key in keys}
        for name, rows in by_peer(result["rows"]).items()
    }


def summarize_small(result: Row) -> Row:
    """Return the medians of the small saves and their paired ratios to the first way."""
    first = next(iter(result["seconds"].values()))
    return {
        name: {
            "median_s": statistics.median(seconds),
            "speedup": statistics.median(a / b for a, b in zip(first, seconds, strict=True)),
        }
        for name, seconds in result["seconds"].items()
    }


def number(value: float | None, form: str = ".3f", suffix: str = "") -> str:
    """Return a number for a table, a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{suffix}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, the first column to the left and the others to the right."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def saves_markdown(result: Row, summary: Row) -> str:
    """Return the table of stall, drain and load."""
    nbytes, limits = result["bytes"], summary["limits"]
    contracts = {kind.name: kind.contract for kind in PEERS}
    rows = []
    for name, row in summary["peers"].items():
        speed = row["durable_s"] and nbytes / row["durable_s"] / 1e9
        rows.append(
            [
                name,
                number(row["returned_s"]),
                number(row["stall_s"]),
                number(row["stall_speedup"], ".2f"),
                number(row["durable_s"]),
                number(speed, ".2f"),
                number(row["durable_speedup"], ".2f"),
                number(row["write_of_fio"], ".0%"),
                number(row["load_s"]),
                number(row["load_speedup"], ".2f"),
                number(row["read_of_fio"], ".0%"),
                contracts[name] + ("" if row["all_bytes_right"] else " **WRONG BYTES LOADED**"),
            ]
        )
    for label, key in (("memmove, 1 thread", "memmove_s"), ("Tensor.copy_", "torch_copy_s")):
        rows.append([label, number(limits[key]), number(limits[key])] + ["-"] * 8 + ["a copy"])
    for label, key in (
        ("fio write", "write"),
        ("fio read, direct", "read_direct"),
        ("fio read, buffered", "read_buffered"),
    ):
        if limits[key]:
            speed, seconds = number(limits[key] / 1e9, ".2f"), number(nbytes / limits[key])
            write = [seconds, speed, "-", "-", "-"] if key == "write" else ["-"] * 4 + [seconds]
            notes = f"{speed} GB/s, the best cell"
            rows.append([label, "-", "-", "-", *write, "-", "-", notes])
    heads = ["peer", "returns s", "may mutate s", "x torch.save", "durable s", "GB/s"]
    heads += ["x torch.save", "of fio", "cold load s", "x torch.save", "of fio", "contract"]
    title = f"### Saves and cold loads of {nbytes / 2**30:.2f} GiB, medians"
    first = result["warm_ups"] + 1
    note = f"Each is save and load number {first} of a process of its own, the first that is timed."
    return f"{title}\n\n{note}\n\n{table(heads, rows)}"


def drag_markdown(result: Row, summary: Row) -> str:
    """Return the table of what a save costs the training beside it."""
    rows = []
    for name, row in summary.items():
        mean, quiet = row["flushing_step_s"], row["quiet_step_s"]
        ratio = None if mean is None else mean / quiet
        steps = number(row["steps_flushing"], ".0f")
        cells = [number(row["lost_s"]), number(row["stall_s"]), number(quiet), number(mean)]
        rows.append([name, *cells, number(ratio, ".2f"), steps])
    heads = [
        "peer",
        "lost s a save",
        "stall s",
        "quiet step s",
        "flushing step s",
        "ratio",
        "steps",
    ]
    title = f"### Training time lost to a save of {result['bytes'] / 2**30:.2f} GiB, medians"
    return f"{title}\n\n{table(heads, rows)}"


def small_markdown(result: Row, summary: Row) -> str:
    """Return the table of small durable saves."""
    rows = [
        [name, number(row["median_s"] * 1e3, ".2f"), number(row["speedup"], ".2f")]
        for name, row in summary.items()
    ]
    title = f"### Durable saves of {result['bytes'] / 1e6:.2f} MB in {result['tensors']} tensors"
    return f"{title}\n\n{table(['way', 'median ms', 'x first row'], rows)}"


def crc_markdown(result: Row, summary: Row) -> str:
    """Return the table of CRC-32 speeds."""
    sizes = list(result["bytes_per_s"])
    names = list(result["bytes_per_s"][sizes[0]])
    rows = [[name, *(number(summary[s][name] / 1e9, ".2f") for s in sizes)] for name in names]
    note = f"\n\nNot measured: {result['missing']}" if result["missing"] else ""
    heads = ["kernel", *(f"GB/s, {size}" for size in sizes)]
    return f"### CRC-32 on one core\n\n{table(heads, rows)}{note}"


def memory_markdown(result: Row, summary: Row) -> str:
    """Return the table of peak memory."""
    rows = []
    for row in summary["rows"]:
        bar = row.get("bar_bytes")
        verdict = "-" if bar is None else "yes" if row["within_bar"] else "NO"
        growth = number(row["growth_bytes"] / 1e6, ".0f")
        rows.append([row["peer"], growth, number(bar and bar / 1e6, ".0f"), verdict])
    title = f"### Peak memory above a resident state of {result['bytes'] / 2**30:.2f} GiB"
    return f"{title}\n\n{table(['peer', 'growth MB', 'bar MB', 'within'], rows)}"


def saves200_markdown(result: Row, summary: Row) -> str:
    """Return the table of what many saves leave behind."""
    rows = []
    for row in summary["rows"]:
        grown = {key: row["after"][key] - row["before"][key] for key in row["after"]}
        sizes = [f"{grown[key] / 1e6:+.1f}" for key in ("rss_bytes", "shm_bytes")]
        counts = [f"{grown[key]:+d}" for key in ("open_files", "threads", "shm_files")]
        rows.append([row["peer"], *sizes, *counts, number(row["median_s"] * 1e3, ".1f")])
    heads = ["peer", "RSS MB", "shm MB", "open files", "threads", "shm files", "median ms"]
    return f"### What {result['saves']} saves of 64 MiB leave behind\n\n{table(heads, rows)}"


def summarize_crc(result: Row) -> Row:
    """Return the median speed of every kernel at every size."""
    return {
        size: {name: statistics.median(speeds) for name, speeds in kernels.items()}
        for size, kernels in result["bytes_per_s"].items()
    }


def summarize_rows(result: Row) -> Row:
    """Return single measurements as they are."""
    return {"rows": measured(result["rows"])}


SECTIONS = {
    "saves": (summarize_saves, saves_markdown),
    "drag": (summarize_drag, drag_markdown),
    "small": (summarize_small, small_markdown),
    "crc": (summarize_crc, crc_markdown),
    "memory": (summarize_rows, memory_markdown),
    "saves200": (summarize_rows, saves200_markdown),
}


def summarize(results: Row) -> Row:
    """Return the medians of every section that was measured."""
    return {name: SECTIONS[name][0](result) for name, result in results.items()}


def markdown(record: Row) -> str:
    """Return the whole run as Markdown."""
    env = record["environment"]
    parts = [
        f"{env['cpu']}, {env['cores']} cores, {env['memory_bytes'] / 2**30:.0f} GiB; "
        f"Linux {env['kernel']}, {env['filesystem']} ({env['mount_options']}); "
        f"Python {env['python']}, torch {env['torch']}; commit {env['commit']}; {env['date']}",
        "Rivals: " + ", ".join(sorted(set().union(*record["requirements"].values()))),
    ]
    for name, result in record["results"].items():
        parts.append(SECTIONS[name][1](result, record["summary"][name]))
    if record["missing"]:
        lines = [f"- {name}: {reason}" for name, reason in record["missing"].items()]
        parts.append("### Not measured\n\n" + "\n".join(lines))
    if record["failures"]:
        parts.append("### Failed\n\n" + "\n".join(f"- {line}" for line in record["failures"]))
    return "\n\n".join(parts)


def bars(axis: Any, title: str, values: dict[str, float | None], unit: str) -> None:
    """Draw one labelled horizontal bar for each value there is."""
    shown = {name: value for name, value in values.items() if value is not None}
    names, numbers = list(shown)[::-1], list(shown.values())[::-1]
    colours = [OURS if name.startswith("fastckpt") else OTHERS for name in names]
    drawn = axis.barh(names, numbers, color=colours)
    axis.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(unit, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)


def limit_line(axis: Any, value: float | None, label: str) -> None:
    """Draw the limit the bars are held against."""
    if value:
        axis.axvline(value, color=LIMIT, linestyle="--", linewidth=1.2, label=label)
        axis.legend(
            fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0
        )


def saves_panels(result: Row, summary: Row) -> list[Any]:
    """Return the drawing functions of the stall, drain and load charts."""
    peers, limits, nbytes = summary["peers"], summary["limits"], result["bytes"]
    size = f"{nbytes / 2**30:.2f} GiB"

    def stall(axis: Any) -> None:
        values = {name: row["stall_s"] for name, row in peers.items()}
        bars(axis, f"Save of {size}: until the state may change", values, "seconds")
        limit_line(axis, limits["memmove_s"], "memmove, 1 thread")

    def drain(axis: Any) -> None:
        values = {
            name: row["durable_s"] and nbytes / row["durable_s"] / 1e9
            for name, row in peers.items()
        }
        bars(axis, f"Save of {size}: call to durable", values, "GB/s")
        limit_line(axis, limits["write"] and limits["write"] / 1e9, "fio write")

    def load(axis: Any) -> None:
        values = {
            name: row["load_s"] and nbytes / row["load_s"] / 1e9 for name, row in peers.items()
        }
        bars(axis, f"Cold load of {size}", values, "GB/s")
        speeds = [limits[key] for key in ("read_direct", "read_buffered") if limits[key]]
        limit_line(axis, max(speeds) / 1e9 if speeds else None, "fio read")

    loaded = any(row["load_s"] is not None for row in peers.values())
    return [stall, drain, load] if loaded else [stall, drain]


def panels(record: Row) -> list[Any]:
    """Return one drawing function for each chart the run can show."""
    results, summary = record["results"], record["summary"]
    drawn = saves_panels(results["saves"], summary["saves"]) if "saves" in results else []
    simple: dict[str, tuple[str, str, Any]] = {
        "drag": ("Training time lost to one save", "seconds", lambda row: row["lost_s"]),
        "small": ("Durable save of 1 MB", "ms", lambda row: row["median_s"] * 1e3),
    }
    for name, (title, unit, value) in simple.items():
        if name in summary:
            values = {peer: value(row) for peer, row in summary[name].items()}
            drawn.append(lambda axis, t=title, v=values, u=unit: bars(axis, t, v, u))
    if "crc" in summary:
        size, speeds = list(summary["crc"].items())[-1]
        values = {name: speed / 1e9 for name, speed in speeds.items()}
        drawn.append(lambda axis, v=values: bars(axis, f"CRC-32 of {size}, one core", v, "GB/s"))
    if "memory" in summary:
        values = {row["peer"]: row["growth_bytes"] / 1e9 for row in summary["memory"]["rows"]}
        drawn.append(lambda axis, v=values: bars(axis, "Peak memory above the state", v, "GB"))
    return drawn


def draw(record: Row, path: Path) -> bool:
    """Draw the run's charts into a PNG; returns whether there was anything to draw with."""
    drawing = panels(record)
    try:
        import matplotlib
    except ImportError as error:
        print(f"no charts: {error}", file=sys.stderr)
        return False
    if not drawing:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(drawing))
    height = -(-len(drawing) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(7.5 * columns, 4.2 * height), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, drawing, strict=False):
        panel(axis)
    for axis in list(axes.flat)[len(drawing) :]:
        axis.set_visible(False)
    env = record["environment"]
    where = f"{env['cpu']}, {env['cores']} cores, {env['filesystem']}, torch {env['torch']}"
    figure.suptitle(f"fastckpt and its peers: {where}", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def write(record: Row, out: Path) -> list[Path]:
    """Write the JSON and the charts of a run; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = record["environment"]["date"].replace("-", "").replace(":", "").split("+")[0]
    stem = f"bench-{stamp}Z"
    files = [out / f"{stem}.json"]
    files[0].write_text(json.dumps(record, indent=1) + "\n")
    if draw(record, out / f"{stem}.png"):
        files.append(out / f"{stem}.png")
    return files
