"""libCacheSim's CSV: time, object, size and next access, with a header line.

Knows the columns; requests are those of `libcachesim`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetap.formats._text import chunks, integers, strings, text
from moetap.formats.base import Base, Options, save_text
from moetap.formats.libcachesim import OPTIONS, requests, what_is_lost
from moetap.trace import Trace


class LibCacheSimCsv(Base):
    name = "libcachesim-csv"
    direction = "export"
    summary = "libCacheSim CSV; global or a file per layer"
    write_options = OPTIONS

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for records, file in requests(trace, path, options, ".csv"):
            save_text(file, _lines(records))
        return what_is_lost(trace, options)


def _lines(records: NDArray[np.void]) -> Iterator[str]:
    yield "time,obj_id,obj_size,next_access_vtime\n"
    objects = records["object"].astype(np.int64)
    sizes = np.zeros(objects.max() + 1, dtype=np.uint32)
    sizes[objects] = records["size"]
    middle = strings([f",{i},{size}," for i, size in enumerate(sizes.tolist())])
    for part in chunks(len(records), 1):
        # Times rise without large gaps: they are rows.
        time = records["time"][part].astype(np.int64)
        times = strings([str(t) for t in range(time[0], time[-1] + 1)])
        following = integers(records["next_access"][part])
        yield text(len(time), times[time - time[0]], middle[objects[part]], *following, "\n")


FORMAT = LibCacheSimCsv()
