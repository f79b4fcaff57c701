"""Writes sglang-stat.pt and sglang-stat-view.pt, with torch itself.

Run once with torch 2.14.1 on Linux; the tests read what it wrote and need no torch. The data are
made by arithmetic (`counts`), in the dict that SGLang's expert distribution recorder saves in mode
stat: see docs/formats/sglang-stat.md. The second file holds a part of a larger buffer with other
strides, and a utilisation rate instead of none.
"""

from pathlib import Path

import torch

PASSES, LAYERS, EXPERTS = 3, 5, 8


def counts(dtype: torch.dtype) -> torch.Tensor:
    """(passes, layers, experts); layers 0 and 3 are dense."""
    p, m, e = torch.meshgrid(*map(torch.arange, (PASSES, LAYERS, EXPERTS)), indexing="ij")
    made = (7 * p + 3 * m + 5 * e) % 11
    made[:, [0, 3]] = 0
    return made.to(dtype)


def main() -> None:
    """Write both files beside this script."""
    folder = Path(__file__).parent
    dump = {
        "rank": 0,
        "logical_count": counts(torch.int32),
        "average_utilization_rate_over_window": None,
    }
    torch.save(dump, folder / "sglang-stat.pt")
    buffer = torch.full((EXPERTS, LAYERS, 2 * PASSES), 99, dtype=torch.int64)
    view = buffer.permute(2, 1, 0)[1::2]
    view[:] = counts(torch.int64)
    dump |= {"logical_count": view, "average_utilization_rate_over_window": 0.8125}
    torch.save(dump, folder / "sglang-stat-view.pt")


if __name__ == "__main__":
    main()
