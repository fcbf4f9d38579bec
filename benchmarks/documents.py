"""The tables and the picture in the documents, made of the records in results/.

    python benchmarks/documents.py          # after a benchmark was run; make bench-all does it

A document has a table between `<!-- results: NAME -->` and `<!-- results end -->`; NAME is a part
of parts.py, another kind of benchmark, or a view of this file. The newest record of a kind counts,
and a test compares it with what stands there. The module must not measure anything.
"""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import comparison
import harness
from harness import ROOT, Line, Row, table
from parts import PARTS, RESULTS
from report import NAMES, SECTIONS, Section, by_peer

PAGES = ("measurements", "bars", "dlio")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / "project" / f"{name}.md" for name in PAGES))
PICTURE = ROOT / "docs" / "images" / "saves"
MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- results end -->)", re.DOTALL)
ALONE = RESULTS.parent  # where benchmarks that are run alone keep their records
# Those that the picture shows.
PICTURED = (
    "torch.save",
    "safetensors",
    "dcp-async",
    "dcp-async-stager",
    "torchsnapshot-async",
    "torch_checkpointing",
    "deepspeed",
    "fastckpt",
    "fastckpt-step",
)
NOTHING = "Not measured yet; `make bench-all` does."


@cache
def record_of(name: str) -> Row | None:
    """Return the newest record of a part or of a kind of benchmark, None if there is none."""
    records: list[Row] = []
    for file in (*RESULTS.glob(f"{name}.json"), *ALONE.glob(f"{name}-*.json")):
        record = json.loads(file.read_text())
        records.append({"command": command_of(file, record)} | record)
    return max(records, key=lambda record: record["environment"]["date"], default=None)


def command_of(file: Path, record: Row) -> str:
    """Return how a record was made that does not say it."""
    hidden = "|".join(harness.HIDDEN_OPTIONS)
    told = " ".join(record["environment"]["argv"])
    kind, options = file.stem.split("-")[0], re.sub(rf" ?({hidden})[ =]\.\.\.", "", told).strip()
    # A record of bench.py in an environment with another torch is kept as torch-VERSION.
    target = "make bench" if kind in ("bench", "torch") else f"make bench-{kind}"
    target += " DLIO=CHECKOUT" if kind == "dlio" else ""
    return f'{target} BENCH_ARGS="{options}"' if options else target


def filled(text: str) -> str:
    """Return text in lines as long as those of the documents."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def machine(record: Row) -> str:
    """Return where a record was made, in words."""
    env = record["environment"]
    cpus = env.get("cpus", env.get("cores"))
    gpus = "".join(f"{name}, " for name in env.get("gpus", ()))
    kernel = env["kernel"].removeprefix("Linux ").split("-")[0]
    return (
        f"{gpus}{env['cpu']}, {cpus} cores, {env['memory_bytes'] / 2**30:.0f} GiB; Linux {kernel}, "
        f"{env['filesystem']}; Python {env['python']}, torch {env['torch']}"
    )


def source(record: Row, beside: Row | None = None) -> str:
    """Return commit, machine and command of a record, in one sentence.

    Args:
        beside: a record above it in the document, whose machine is named already.
    """
    env = record["environment"]
    commit, _, changed = env["commit"].partition(" ")
    told = record["command"]
    is_same = beside is not None and machine(beside) == machine(record)
    where = "the same machine" if is_same else machine(record)
    name = f"{commit[:9]} {changed}".strip()
    return f"Commit {name}, {env['date'][:10]}; {where}; `{told}`."


def lines_of(record: Row) -> list[Line]:
    """Return the lines of a record that have a bar or a rival, with the names of sections if it has
    some.
    """
    sections = record["lines"]
    sections = {"": sections} if isinstance(sections, list) else sections
    found = {title: [Line(**line) for line in lines] for title, lines in sections.items()}
    if of_workloads := workloads(record):  # as today's bars are
        found = {section.title(its): section.lines(its) for section, its in of_workloads}
    lines = []
    for title, its in found.items():
        where = f"*{record.get('titles', {}).get(title, title)}*: " if len(found) > 1 else ""
        shown = [line for line in its if line.bar or line.rival]
        lines += [replace(line, what=f"{where}{line.what}") for line in shown]
    return lines


def bars(names: Sequence[str], beside: Row | None) -> str:
    """Return the lines of several parts as one table, each under what its record is of."""
    lines = []
    for name in names:
        if record := record_of(name):
            told = source(record, beside)
            if missing := [*record.get("missing", {})]:
                told += f" Not measured: {'; '.join(missing)}."
            lines += [Line(f"**{name}.** {told}", "", ""), *lines_of(record)]
        else:
            lines.append(Line(f"**{name}.** {NOTHING}", "", ""))
    told = harness.markdown(lines)
    return told.replace("**FAIL**", "**missed**").replace("PASS", "met")


def merged(record: Row) -> list[str]:
    """Return the summary of a record, or its tables, those with the same heads as one that has a
    row for each title.
    """
    tables: dict[str, list[str]] = record.get("tables", {})
    if "summary" in tables:
        return tables["summary"]
    found: dict[str, list[str]] = {}
    for title, text in ((title, text) for title, its in tables.items() for text in its):
        heads, rule, *rows = text.splitlines()
        titled = [f"| **{title}** |{' |' * (heads.count('|') - 2)}"] if len(tables) > 1 else []
        found.setdefault(f"{heads}\n{rule}", []).extend([*titled, *rows])
    return ["\n".join([heads, *rows]) for heads, rows in found.items()]


def workloads(record: Row) -> list[tuple[Section, Row]]:
    """Return the workloads of a record of bench.py, with their results."""
    results = record.get("results", ())
    return [(section, results[name]) for name, section in SECTIONS.items() if name in results]


def by_workload(record: Row) -> list[str]:
    """Return what a record of bench.py has, from its rows; its bars are on a page of their own."""
    tables = [
        [f"**{section.title(its)}**", *section.tables(its)] for section, its in workloads(record)
    ]
    return [text for found in tables for text in found]


def part(name: str, beside: Row | None) -> str:
    """Return all that a part of bench.py has measured, or the tables of another benchmark."""
    record = record_of(name)
    if record is None:
        return NOTHING
    beside = None if name == "saves" else beside
    notes = [f"{note.removesuffix('.')}." for note in record.get("notes", ()) if not beside]
    found = [filled(" ".join([source(record, beside), *notes]))]
    found += by_workload(record) or merged(record)
    if missing := [*record.get("missing", {})]:
        found.append(filled(f"Not measured in this run: {'; '.join(missing)}."))
    if failures := record.get("failures"):
        told = "; ".join(textwrap.shorten(line, 120) for line in failures)
        found.append(filled(f"Failed in this run: {told}."))
    return "\n\n".join(found)


def readme() -> str:
    """Return the table of the README: our seconds, and how long others take."""
    saves = record_of("saves")
    if saves is None:
        return NOTHING
    gpu = on_disk()
    rounds = len(by_peer(saves["results"]["saves"]["rows"])["fastckpt"])
    gpu_rounds = len(by_peer(gpu["results"]["commit"]["rows"])["fastckpt"])
    footnote = (
        "fastckpt's rows give seconds from the call; the rows below say how many times as long "
        "others take. "
        f"Medians of {rounds} saves on the CPU and of {gpu_rounds} on the H100; "
        "every library syncs its files. [Measurements](docs/project/measurements.md) has more, "
        "including where fastckpt is slower. "
        f"CPU: {machine(saves)} ({dated(saves)}). H100: "
        f"{machine(gpu).removeprefix('NVIDIA H100 80GB HBM3, ')} ({dated(gpu)})."
    )
    return f"{comparison.gains(saves, gpu)}\n\n{filled(footnote)}"


def dated(record: Row) -> str:
    """Return the commit and the day of a record, to be read."""
    return f"fastckpt {record['environment']['commit'][:9]}, {record['environment']['date'][:10]}"


def compare() -> str:
    """Return the user's table: ours beside torch's own, the best rival and the machine's limit."""
    names = (*(part.name for part in PARTS), "dlio")
    records = {name: record for name in names if (record := record_of(name)) is not None}
    return comparison.comparison({**records, "gpu": on_disk()}) if "saves" in records else NOTHING


def details() -> str:
    """Return what else is known of the saves: the first of a process, and how each peer saves."""
    saves = record_of("saves")
    return NOTHING if saves is None else comparison.details(saves)


def on_disk() -> Row:
    """Return the record of saves from a GPU to a disk, and of loads from it."""
    run, name = GPU_DISK
    record: Row = json.loads((ALONE / run / "bench" / name).read_text())
    record["environment"]["commit"] = GPU_RUNS[run]
    return record


# Where the records of runs on a GPU are, and of what commit: a copy without history says another.
GPU_RUNS = {
    "gpu-2026-11-26/third": "5f91e99",
    "gpu-2026-11-27/first": "050659c",
    "gpu-2026-11-27/second": "b5da888",
}
# The newest of these with saves to a disk and loads from it.
GPU_DISK = ("gpu-2026-11-27/first", "gpu-20261127T014729Z.json")


def gpu() -> str:
    """Return the lines of the newest runs on a GPU, failures in bold."""
    found: dict[str, dict[str, str]] = {}
    bars, environments = {}, {}
    for run in GPU_RUNS:
        for file in sorted((ALONE / run).rglob("*.json")):
            record = json.loads(file.read_text())
            environments[run] = record["environment"]
            for line in (line for lines in record["lines"].values() for line in lines):
                text = (
                    line["measured"] if line["passed"] is not False else f"**{line['measured']}**"
                )
                found.setdefault(line["what"], {})[run] = text
                bars[line["what"]] = line["bar"]
    rows = [
        [what, bars[what], *(cells.get(run, "-") for run in GPU_RUNS)]
        for what, cells in found.items()
        # Bytes that came back as they were saved, and a second clock, are left to the records.
        if bars[what] and {*cells.values()} != {"yes"} and "wall time" not in what
    ]
    env = environments[[*GPU_RUNS][-1]]
    heads = ["what", "bar"]
    heads += [f"{environments[run]['date'][:10]}, {commit}" for run, commit in GPU_RUNS.items()]
    told = (
        f"{env['gpus'][0]}, {env['cpu']}, {env['cpus']} cores; torch {env['torch']}, Python "
        f"{env['python']}. `make gpu-proof`, medians of two or three rounds "
        "(the records have each round); what failed its bar is bold."
    )
    return f"{filled(told)}\n\n{table(heads, rows)}"


def gpu_training() -> str:
    """Return what saves cost a training loop on a GPU."""
    run, commit = [*GPU_RUNS.items()][-1]
    found = [(file, json.loads(file.read_text())) for file in (ALONE / run).rglob("*.json")]
    ((file, record),) = ((file, record) for file, record in found if "train" in record["tables"])
    record["environment"]["commit"] = commit
    record["command"] = command_of(file, record)
    (told,) = record["tables"]["train"]
    note, rows = told.split("\n\n")
    return f"{filled(f'{note} {source(record)}')}\n\n{rows}"


VIEWS: dict[str, Callable[[], str]] = {
    "readme": readme,
    "compare": compare,
    "details": details,
    "gpu": gpu,
    "gpu-training": gpu_training,
}


def made(text: str) -> str:
    """Return a document with its tables as the records have them."""
    beside = record_of("saves") if "<!-- results: saves -->" in text else None

    def between(match: re.Match[str]) -> str:
        kind, _, names = match[2].partition(":")
        if kind == "bars":
            found = bars(harness.words(names), beside)
        else:
            found = VIEWS[kind]() if kind in VIEWS else part(kind, beside)
        return f"{match[1]}{found}\n\n{match[3]}"

    return MARKED.sub(between, text)


def draw() -> None:
    """Draw until when the state may not change, and until when it is not durable, by peer."""
    import matplotlib

    record = record_of("saves")
    assert record is not None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fastckpt", "font.size": 10})
    from matplotlib import pyplot

    groups = by_peer(record["results"]["saves"]["rows"])
    names = [name for name in PICTURED if name in groups][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.2))
    for key, offset, label, color in (
        ("durable_s", -0.2, "until it is durable", "#9db8d2"),
        ("stall_s", 0.2, "until the state may change", "#c2452d"),
    ):
        values = [harness.middle(groups[name], key) for name in names]
        places = [place + offset for place in range(len(names))]
        bars = axes.barh(places, values, 0.38, label=label, color=color)
        axes.bar_label(bars, fmt="%.2f s", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), [NAMES[name].strip("*") for name in names])
    axes.set_xlabel(f"seconds, {harness.number(size_of(record), '.2g')} GiB; less is better")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    told = origin(record)
    figure.savefig(PICTURE.with_suffix(".svg"), metadata={"Date": None, "Description": told})
    figure.savefig(PICTURE.with_suffix(".png"), dpi=110, metadata={"Description": told})
    pyplot.close(figure)


def origin(record: Row) -> str:
    """Return the commit and the time of a record."""
    return f"commit {record['environment']['commit']}, {record['environment']['date']}"


def size_of(record: Row) -> float:
    """Return the GiB of the state that a record of saves is of."""
    return float(record["results"]["saves"]["bytes"] / 2**30)


def write(documents: tuple[Path, ...] = DOCUMENTS) -> None:
    """Write the tables into the documents, and draw the pictures, one only with matplotlib."""
    record_of.cache_clear()
    for document in documents:
        document.write_text(made(document.read_text()))
        harness.progress(f"wrote {document.name}")
    runpy.run_path(str(ROOT / "docs" / "pictures.py"), run_name="__main__")
    try:
        draw()
    except ImportError:
        harness.progress("no picture: matplotlib is not installed")


if __name__ == "__main__":
    write()
