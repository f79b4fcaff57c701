"""Draw docs/analyze.svg: the union table of the sample trace, as a terminal shows it.

python docs/picture.py
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from moetap.analysis.pool import pool
from moetap.analysis.unions import union_table
from moetap.report import union_table as shown
from moetap.store import read

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Record what `moetap analyze` prints and write it as SVG."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    shown.make_console = lambda: console
    shown.print_union_table(union_table(pool([read(ROOT / "traces/sample/demo.h5")])))
    svg = console.export_svg(title="moetap analyze traces/sample/demo.h5")
    # rich links web fonts; the picture must not load anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (ROOT / "docs/analyze.svg").write_text(svg.replace("Fira Code, monospace", "monospace"))


if __name__ == "__main__":
    main()
