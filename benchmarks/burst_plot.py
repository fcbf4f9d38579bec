"""The picture of a burst: bars of stall, commit and a reader's latency, as SVG without a library.

It must not know how anything was measured.
"""

from __future__ import annotations

from html import escape
from typing import Any

PANELS = (
    ("stall_s", "training stands still", 1.0, "s"),
    ("committed_s", "committed", 1.0, "s"),
    ("p99_s", "another's reads, p99", 1e3, "ms"),
)
WIDTH, BAR, GAP, LABEL, TOP = 720, 18, 6, 130, 34


def svg(found: dict[str, dict[str, Any]]) -> str:
    """Return a panel for each of PANELS, with a bar for each way."""
    height = len(PANELS) * (TOP + len(found) * (BAR + GAP)) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    y = 0
    for key, title, factor, unit in PANELS:
        parts.append(f'<text x="8" y="{y + 22}" font-weight="bold">{escape(title)} ({unit})</text>')
        y += TOP
        longest = max(row[key] for row in found.values()) or 1.0
        for name, row in found.items():
            width = (WIDTH - LABEL - 90) * row[key] / longest
            parts.append(f'<text x="8" y="{y + 13}">{escape(name)}</text>')
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" fill="#4878a8"/>'
            )
            value = f"{factor * row[key]:.3g}"
            parts.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">{value}</text>')
            y += BAR + GAP
        if key == "p99_s":
            idle = min(row["idle_p99_s"] for row in found.values())
            x = LABEL + (WIDTH - LABEL - 90) * idle / longest
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - len(found) * (BAR + GAP)}" y2="{y}" '
                'stroke="#c04040" stroke-dasharray="3"/>'
            )
            parts.append(f'<text x="{x:.1f}" y="{y + 12}" fill="#c04040">idle</text>')
    return "\n".join([*parts, "</svg>", ""])
