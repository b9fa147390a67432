"""x (n, k) times a quantised weight (m, k): chooses the kernels and puts them on the tape.

Types with blocks of 32: one kernel family, which keeps a block of LANES rows in registers for all tokens
(matmul_tile_32.py); with AMX, for more than eight, the tile registers (matmul_prompt_32.py). K types: for one token,
with AVX-512 for up to four, the row kernels, which read every weight row's bytes in order; for more the tile kernels,
which unpack LANES rows at a time and use them for all tokens (some types, up to eight tokens: matmul_few_k.py); with
AMX, for up to eight, the tile registers (matmul_amx.py), for some types for more as well (matmul_prompt_k.py). All give
the same bits (matmul_32.py and matmul_tile_k.py say what is computed). Weights stay in the file's own bytes; x is
quantised once and kept with it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from edgellm.backends.cpu import (
    matmul_32,
    matmul_amx,
    matmul_few_k,
    matmul_prompt_32,
    matmul_prompt_k,
    matmul_row,
    matmul_row_512,
    matmul_row_k,
    matmul_tile_32,
    matmul_tile_k,
    matmul_unpack_k,
)
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel
from edgellm.backends.cpu.quantise import Layout, panel_of, quantise_kernel
from edgellm.backends.cpu.simd import ISA
from edgellm.backends.cpu.simd_amx import HAS_TILES
from edgellm.backends.cpu.simd_wide import LANES
from edgellm.backends.cpu.tape import Tape
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = [
    "K_FORMATS",
    "QUANTISED",
    "linear_kernel",
    "panel_width",
    "quantised",
    "record_matmul",
    "scratch_bytes",
    "units_of",
]

K_FORMATS = {form.name.upper(): form for form in matmul_unpack_k.FORMATS}
FORMATS_32 = {form.name.upper(): form for form in matmul_32.FORMATS}
QUANTISED = frozenset(K_FORMATS) | frozenset(FORMATS_32)
"""Names of the types that this module multiplies."""


def by_tiles(kind: str, width: int) -> bool:
    """Whether up to `width` tokens in one panel go through tile registers."""
    return HAS_TILES and (kind.lower(), width) in matmul_amx.FORMATS


def in_registers(kind: str, width: int) -> bool:
    """Whether codes of this type stay in registers for up to `width` tokens in one panel."""
    return width in matmul_few_k.PANELS.get(kind.lower(), ())


@cache
def linear_kernel(kind: str, width: int, single: bool = False) -> Kernel:
    """The kernel for a type that takes `width` tokens at once (a panel width). `single`: there is one panel, and there
    are at least LANES rows."""
    if kind in FORMATS_32:
        form_32 = FORMATS_32[kind]
        by_products = width == matmul_prompt_32.PANEL
        return matmul_prompt_32.prompt_kernel(form_32) if by_products else matmul_tile_32.tile_kernel(form_32, width)
    form = K_FORMATS[kind]
    if single and by_tiles(kind, width):
        return matmul_amx.few_kernel(form.name, width)
    if width == matmul_prompt_k.PANEL and form.name in matmul_prompt_k.PIECES:
        return matmul_prompt_k.prompt_kernel(form)
    if single and in_registers(kind, width):
        return matmul_few_k.few_kernel(form, width)
    if panel_width(kind, width) < width:
        return matmul_row_512.row_kernel(form.name, width)
    return matmul_row_k.row_kernel(form.name, form.type_size) if width == 1 else matmul_tile_k.tile_kernel(form, width)


def panel_width(kind: str, width: int, single: bool = False) -> int:
    """Tokens in a panel of what `linear_kernel` reads."""
    by_rows = ISA == "avx512" and width <= 4 and kind.lower() in matmul_row_512.FORMATS
    return 1 if by_rows and not (single and (by_tiles(kind, width) or in_registers(kind, width))) else width


def units_of(kind: str, m: int) -> int:
    """Units of work in a product with m rows of weights."""
    return m if kind in FORMATS_32 and m < LANES else -(-m // LANES)


def scratch_bytes(kind: str, layout: Layout, width: int, single: bool = False) -> int:
    """Scratch that each thread needs for `linear_kernel`."""
    if kind in FORMATS_32:
        return matmul_prompt_32.SCRATCH if width == matmul_prompt_32.PANEL else matmul_tile_32.SCRATCH
    if single and by_tiles(kind, width):
        return matmul_amx.few_scratch(layout.n_blocks)
    if layout.panel == 1 and not (single and in_registers(kind, width)):
        return matmul_row.row_scratch(layout.n_blocks, layout.block, width)
    if width == matmul_prompt_k.PANEL and kind.lower() in matmul_prompt_k.PIECES:
        return matmul_prompt_k.prompt_scratch(layout.n_panels)
    return matmul_tile_k.TILE_BYTES + layout.n_panels * layout.panel * 4 * LANES


def quantised(tape: Tape, x: Buf, k: int, block: int, panel: int) -> tuple[Layout, Buf]:
    """x as rows of k in int8 blocks; made at the first call for a handle, then shared."""
    key = ("int8", k, block, panel)
    if key not in x.derived:
        layout = Layout(block, panel, x.size // k, k)
        out = tape.new(layout.nbytes, itemsize=1)
        q, sums, d = layout.addresses(out.address)
        args = (x, 4 * k, layout.n_blocks, q, sums, d, layout.n_panels)
        units = layout.n_tokens * layout.n_blocks
        grain = (x, block)
        tape.op(quantise_kernel(block, panel), units, args, reads=[x], writes=[out], step=0, scratch=64, grain=grain)
        x.derived[key] = layout, out
    return x.derived[key]


def record_matmul(tape: Tape, x: Buf, kind: GGMLType, weight: int, bias: Any, out: Buf) -> None:
    """Append x (n, k) @ w (m, k)^T + bias (float32 array or None) to the tape. `weight`: address of the rows."""
    (n, k), m = x.shape, out.shape[1]
    info = QUANT_TABLE[kind]
    width = panel_of(n, info.block_size) if m >= LANES else 1
    single = n <= width and m >= LANES
    layout, form = quantised(tape, x, k, info.block_size, panel_width(kind.name, width, single))
    args = (
        *(weight, layout.n_blocks * info.type_size, m, layout.n_blocks),
        *layout.addresses(form.address),
        *(n, layout.n_panels, out, 4 * m, 0 if bias is None else bias, 0),
    )
    units = units_of(kind.name, m)
    scratch = scratch_bytes(kind.name, layout, width, single)
    tape.op(linear_kernel(kind.name, width, single), units, args, [form], [out], 0, scratch)
