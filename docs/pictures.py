"""The pictures of the concepts and guides, as SVG: what they show, and how it is drawn.

    python docs/pictures.py   # writes docs/images/*.svg

The times of the timeline are those of the record of saves in benchmarks/results; a test compares
the files with what this module makes. It must not need anything but Python.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
RECORD = ROOT / "benchmarks" / "results" / "all" / "saves.json"

INK, FAINT, PAPER = "#24292f", "#8b949e", "#ffffff"
WAIT, TRAIN, COPY, WRITE, KEEP, BAD = (
    "#c2452d",
    "#8fbf8f",
    "#e0a030",
    "#9db8d2",
    "#d9dee3",
    "#e8b4a8",
)


class Picture:
    """A drawing of rectangles, texts and arrows, with sizes in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, text: str = ""
    ) -> None:
        """A rectangle, with its text in the middle, a line for each line of it."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{INK}" stroke-width="0.6"/>'
        )
        lines = text.split("\n") if text else []
        for place, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 16 * (place - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK) -> None:
        """A line of text; y is its base line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight arrow."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" '
            'stroke-width="1.2" marker-end="url(#tip)"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A thin line."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{FAINT}" '
            'stroke-width="0.8"/>'
        )

    def svg(self) -> str:
        """Returns the whole file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def medians() -> dict[str, dict[str, float]]:
    """Returns the clocks of torch.save and of both fences, from the record."""
    result = json.loads(RECORD.read_text())["results"]["saves"]
    clocks = ("returned_s", "stall_s", "durable_s")
    rows = [row for row in result["rows"] if "error" not in row]
    return {
        name: {
            clock: statistics.median(row[clock] for row in rows if row["peer"] == name)
            for clock in clocks
        }
        for name in ("torch.save", "fastckpt", "fastckpt-step")
    }


def save_flow() -> str:
    """The timeline of a save, by torch.save and with both fences."""
    found, left, width = medians(), 180, 588
    end = 1.2 * max(clock for clocks in found.values() for clock in clocks.values())
    scale = width / end
    picture = Picture(800, 400, "A save by torch.save, with the call fence, with the step fence")

    def at(seconds: float) -> float:
        return left + scale * seconds

    def lane(y: float, name: str, *bars: tuple[float, float, str, str]) -> None:
        picture.text(left - 12, y + 17, name, "end")
        for begin, stop, fill, text in bars:
            picture.box(at(begin), y, scale * (stop - begin), 24, fill, text)

    stock, call, step = found["torch.save"], found["fastckpt"], found["fastckpt-step"]
    saved, durable = stock["stall_s"], stock["durable_s"]
    picture.text(16, 24, "torch.save, then fsync")
    waits = (0.0, saved, WAIT, "torch.save"), (saved, durable, BAD, "fsync")
    lane(36, "training thread", *waits, (durable, end, TRAIN, "train"))
    picture.text(16, 96, "fastckpt, call fence")
    copied, durable = call["stall_s"], call["durable_s"]
    lane(108, "training thread", (0, copied, WAIT, ""), (copied, end, TRAIN, "train"))
    lane(138, "copying threads", (0, copied, COPY, ""))
    lane(168, "disk", (0, durable, WRITE, "write, sync, rename"))
    picture.text(16, 228, "fastckpt, step fence")
    back, copied, durable = step["returned_s"], step["stall_s"], step["durable_s"]
    lane(240, "training thread", (0, back, WAIT, ""), (back, end, TRAIN, "forward, backward, step"))
    lane(270, "copying threads", (back, copied, COPY, ""))
    lane(300, "disk", (back, durable, WRITE, "write, sync, rename"))
    picture.text(at(copied) + 6, 287, "the next optimizer.step() waits until here", fill=FAINT)
    picture.line(left, 344, at(end), 344)
    for fifth in range(int(5 * end) + 1):
        picture.line(at(fifth / 5), 340, at(fifth / 5), 348)
        picture.text(at(fifth / 5), 364, f"{fifth / 5:g} s", "middle")
    picture.text(
        16,
        388,
        "1 GiB on two cores, medians. Red: training waits. When writing begins is sketched.",
        fill=FAINT,
    )
    return picture.svg()


def ranks_one_file() -> str:
    """Four ranks write one file."""
    picture = Picture(800, 250, "Four ranks write disjoint parts of one file")
    for rank in range(4):
        x = 20 + 150 * rank
        picture.box(x, 20, 130, 44, TRAIN, f"rank {rank}\nthe same object")
        picture.arrow(x + 65, 66, x + 65, 108)
        picture.box(x - 10 if rank else x, 110, 150 if rank else 140, 44, WRITE, f"interval {rank}")
    picture.box(610, 110, 170, 44, KEEP, "tail, by rank 0:\nsmall tensors, checksums")
    picture.text(20, 182, "The intervals follow from the sizes alone, so ranks need not talk.")
    picture.text(20, 206, "Rank 0 writes the tail, and renames the file when all ranks have")
    picture.text(20, 224, "reported that their parts are on the disk.")
    return picture.svg()


def tiers() -> str:
    """A step by way of the nodes."""
    picture = Picture(800, 300, "A step on the nodes, at a neighbour, in the root")
    for node in range(2):
        y = 30 + 130 * node
        picture.box(20, y, 130, 70, TRAIN, f"node {node}\ntraining")
        picture.arrow(152, y + 35, 228, y + 35)
        picture.box(230, y, 190, 70, COPY, f"memory or disk\nof node {node}")
        picture.arrow(422, y + 35, 588, 140)
    picture.arrow(300, 102, 300, 158)
    picture.arrow(350, 158, 350, 102)
    picture.text(362, 134, "2. copy to a neighbour")
    picture.text(154, 22, "1. commit on the nodes")
    picture.box(590, 90, 190, 90, WRITE, "root:\nshared storage\nor a bucket")
    picture.text(520, 70, "3. drain, commit in the root")
    picture.text(20, 262, "After 1 the job survives the death of a process, after 2 (memory only)")
    picture.text(20, 282, "the loss of a node, after 3 the loss of all nodes.")
    return picture.svg()


def commit() -> str:
    """The order of a commit."""
    picture = Picture(800, 220, "Write, sync, rename, sync: what a crash leaves at each moment")
    stages = ("write to a\ntemporary file", "sync the\nfile", "rename it to\nckpt.pt")
    stages = (*stages, "sync the\ndirectory")
    for place, stage in enumerate(stages):
        x = 20 + 195 * place
        picture.box(x, 30, 170, 56, (WRITE, WRITE, COPY, WRITE)[place], stage)
        if place:
            picture.arrow(x - 24, 58, x - 2, 58)
    picture.box(20, 120, 365, 34, KEEP, "a crash here leaves the old file")
    picture.box(410, 120, 170, 34, KEEP, "old or new, complete")
    picture.box(605, 120, 170, 34, TRAIN, "the new file")
    picture.text(20, 190, "result() returns after the last step. At no moment is the name missing,")
    picture.text(20, 208, "and at no moment does it lead to a part of a file.")
    return picture.svg()


def verification() -> str:
    """The blocks of a file and their checksums."""
    picture = Picture(800, 240, "Blocks of 8 MiB, each with a CRC-32 in the tail of the file")
    names = ("block 0", "block 1", "block 2: damaged", "block 3")
    for place, name in enumerate(names):
        x = 20 + 150 * place
        picture.box(x, 30, 140, 50, BAD if place == 2 else WRITE, name)
        picture.arrow(x + 70, 82, x + 70, 128)
        picture.box(
            x,
            130,
            140,
            34,
            BAD if place == 2 else KEEP,
            "CRC-32 differs" if place == 2 else "CRC-32 equal",
        )
    picture.box(630, 30, 150, 134, KEEP, "tail:\nfour CRC-32s,\nand its own")
    picture.text(
        20, 200, "A block is compared before any of its bytes is used. The error names the"
    )
    picture.text(
        20,
        218,
        "tensor that the damaged block belongs to. To read rows, only their blocks are read.",
    )
    return picture.svg()


def agreement() -> str:
    """How ranks commit together, and how they fail together."""
    picture = Picture(800, 250, "Ranks report to the first one, which decides")
    for rank in range(4):
        y = 30 + 44 * rank
        picture.box(20, y, 90, 32, TRAIN, f"rank {rank}")
        picture.box(
            130,
            y,
            190,
            32,
            BAD if rank == 2 else WRITE,
            "disk full" if rank == 2 else "written and synced",
        )
        picture.arrow(322, y + 16, 438, 112)
    picture.box(440, 86, 150, 56, COPY, "first rank\ndecides")
    picture.arrow(592, 100, 638, 64)
    picture.arrow(592, 128, 638, 164)
    picture.box(640, 34, 145, 56, TRAIN, "all have reported:\ncommit")
    picture.box(640, 136, 145, 56, BAD, "one has failed:\nno commit")
    picture.text(
        20,
        232,
        "Every rank hears the outcome: here all raise an error that names rank 2 and its cause.",
    )
    return picture.svg()


PICTURES = {
    "save-flow": save_flow,
    "ranks-one-file": ranks_one_file,
    "tiers": tiers,
    "commit": commit,
    "verification": verification,
    "agreement": agreement,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
