"""Machines that a plan can be made for without having one: memory, bandwidth, and where the figures come from.

Bandwidths are the makers' peak figures, so a rate computed from them is a ceiling that nothing can pass. Sources:
[A] Apple's "Tech Specs" pages (support.apple.com/specs) and press releases of each chip; where a chip has two figures
the number of its GPU cores decides, and the table has both. [J] bus width times transfer rate of the JEDEC standard
named. [N] NVIDIA's product pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.errors import RequestError

__all__ = ["MACHINES", "Machine", "machine"]

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """`memory` and `budget` in bytes, `bandwidth` in bytes per second."""

    name: str
    memory: int
    budget: int
    """What a model may take: on a Mac what Metal lets the GPU hold by default, on a PC three quarters of the memory, on
    a graphics card all but 1 GiB."""
    bandwidth: float
    source: str


def _mac(chip: str, gb_s: float, *sizes: int) -> list[Machine]:
    """Metal's default limit (recommendedMaxWorkingSetSize): two thirds up to 32 GB, three quarters above. Newer
    systems allow more, and `sudo sysctl iogpu.wired_limit_mb=N` raises it."""
    share = {size: (2 / 3 if size <= 32 else 3 / 4) for size in sizes}
    return [Machine(f"{chip}-{n}gb", n * GIB, int(n * GIB * share[n]), gb_s * 1e9, "[A]") for n in sizes]


def _pc(kind: str, gb_s: float, source: str, *sizes: int) -> list[Machine]:
    return [Machine(f"{kind}-{n}gb", n * GIB, n * GIB * 3 // 4, gb_s * 1e9, source) for n in sizes]


_ALL = [
    *_mac("m1", 68.25, 8, 16),
    *_mac("m1-pro", 200, 16, 32),
    *_mac("m1-max", 400, 32, 64),
    *_mac("m1-ultra", 800, 64, 128),
    *_mac("m2", 100, 8, 16, 24),
    *_mac("m2-pro", 200, 16, 32),
    *_mac("m2-max", 400, 32, 64, 96),
    *_mac("m2-ultra", 800, 64, 128, 192),
    *_mac("m3", 100, 8, 16, 24),
    *_mac("m3-pro", 150, 18, 36),
    *_mac("m3-max", 300, 36, 96),
    *_mac("m3-max", 400, 48, 64, 128),
    *_mac("m3-ultra", 819, 96, 256, 512),
    *_mac("m4", 120, 16, 24, 32),
    *_mac("m4-pro", 273, 24, 48, 64),
    *_mac("m4-max", 410, 36),
    *_mac("m4-max", 546, 48, 64, 128),
    *_pc("ddr4-3200", 51.2, "[J] JESD79-4, two channels", 8, 16, 32),
    *_pc("ddr5-5600", 89.6, "[J] JESD79-5, two channels", 16, 32, 64),
    *(Machine(f"rtx-{c}-24gb", 24 * GIB, 23 * GIB, b, "[N]") for c, b in (("3090", 936e9), ("4090", 1008e9))),
]
MACHINES: dict[str, Machine] = {m.name: m for m in _ALL}


def machine(name: str) -> Machine:
    """The machine of that name; RequestError with the known ones."""
    found = MACHINES.get(name.strip().lower())
    if found is None:
        raise RequestError(f"no machine named {ascii(name)[:60]}; known: {', '.join(MACHINES)}")
    return found
