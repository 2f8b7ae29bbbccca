"""The chart of docs/index.md: our server compared with the official Node server."""

from __future__ import annotations

import math
import re

from scripts.generated_docs.source import REPOSITORY
from scripts.generated_docs.svg import picture

_RATIO = re.compile(
    r"^\| (?P<what>[^|]+) \| (?P<other>official Node[^|]+) \| (?P<ratio>[\d.]+) \W(?P<rest>[^|]*) \|$", re.MULTILINE
)
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#7a8594}.bar{fill:#0f9488}.other{fill:#a9b4c0}"
    ".value{font-weight:600;fill:#0f9488}"
)


def benchmarks_chart() -> str:
    """The ratios to the official Node server in docs/benchmarks.md as bars, on a logarithmic scale."""
    page = (REPOSITORY / "docs/benchmarks.md").read_text(encoding="utf-8")
    parts = []
    found = list(_RATIO.finditer(page))
    for row, match in enumerate(found):
        ratio = float(match["ratio"])
        is_lower_better = "lower" in match["rest"]
        times = 1 / ratio if is_lower_better else ratio
        text = f"{times:.1f} times {'lower' if is_lower_better else 'as fast'}"
        y = 34 + row * 46
        width = 14 + 330 * math.log(max(times, 1.0)) / math.log(100)
        what = match["what"].replace("`", "")
        parts.append(
            f'<text x="10" y="{y}">{what}</text><rect class="other" x="10" y="{y + 7}" width="14" height="14" rx="3"/>'
            f'<rect class="bar" x="10" y="{y + 7}" width="{width:.0f}" height="14" rx="3"/>'
            f'<text class="value" x="{width + 18:.0f}" y="{y + 19}">{text}</text>'
        )
    height = 46 + 46 * len(found)
    title = f"Compared with the official Node server: {len(found)} measurements of docs/benchmarks.md"
    head = '<text x="10" y="12">times the official Node server, logarithmic scale</text>'
    size = f'viewBox="0 0 560 {height}" width="560" height="{height}"'
    return picture(size, title, _STYLE, head + "".join(parts))
