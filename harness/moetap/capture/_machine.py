"""The machine at hand: chip, memory and system, recorded with each trace.

This and `_mlx.backend` are all that asks the operating system what it is. Knows nothing about MLX.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys


def chip() -> str:
    """Marketing name of the processor ("Apple M4 Pro"), "" if the system does not tell."""
    if sys.platform == "darwin":
        try:
            out = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return out.stdout.strip()
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def ram_bytes() -> int:
    """Physical memory. POSIX on both macOS and Linux, so no sysctl is needed."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def swap_bytes() -> int | None:
    """Swap in use, None if the system does not tell."""
    try:
        if sys.platform == "darwin":
            out = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "vm.swapusage"],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
            # "total = 2048.00M  used = 1023.25M  free = 1024.75M  (encrypted)"
            return int(float(out.stdout.split("used = ")[1].split("M")[0]) * 2**20)
        with open("/proc/meminfo") as lines:
            kib = {k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines)}
        return (kib["SwapTotal"] - kib["SwapFree"]) * 1024
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return None


def swap_growth(before: int | None) -> int | None:
    """Bytes by which swap in use has grown since it was `before`, None if the system does not tell.
    Other programs' swapping counts too: the system does not say whose it is.
    """
    now = swap_bytes()
    return None if before is None or now is None else now - before


def operating_system() -> str:
    """Such as "macOS 26.1 arm64" or "Linux 6.12 x86_64"."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.system()} {platform.release()} {platform.machine()}"
