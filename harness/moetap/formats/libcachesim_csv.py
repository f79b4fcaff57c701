"""libCacheSim's CSV: time, object, size and next access, with a header line.

Knows the columns; requests are those of `libcachesim`.
"""

from __future__ import annotations

from pathlib import Path

from moetap.formats.base import Base, Options, save_lines
from moetap.formats.libcachesim import OPTIONS, requests, what_is_lost
from moetap.trace import Trace


class LibCacheSimCsv(Base):
    name = "libcachesim-csv"
    direction = "export"
    summary = "libCacheSim CSV (time, object, size, next access); per layer or global"
    write_options = OPTIONS

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for records, file in requests(trace, path, options, ".csv"):
            lines = [",".join(map(str, record)) for record in records.tolist()]
            save_lines(file, ["time,obj_id,obj_size,next_access_vtime", *lines])
        return what_is_lost(trace, options)


FORMAT = LibCacheSimCsv()
