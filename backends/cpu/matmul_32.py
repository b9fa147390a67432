"""Types with blocks of 32 weights: where things lie in a block, and how codes are unpacked.

Per block: codes c (0..31, or signed bytes), scale d, sometimes a minimum m. With activations q, their sum and scale dx:

    isum = sum of c q - offset (sum of q)          exact, int32
    value = d isum                                  or: value = fma(sum of q, m, d isum)
    y = fma(value, dx, y)                           float32, blocks in rising order
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.simd import Vector, bit_and, mul, shift_left
from edgellm.backends.cpu.simd_wide import splat_ints


@dataclass(frozen=True)
class Format32:
    """One type with blocks of 32. Offsets are in bytes from the start of a block; d (float16) comes first."""

    name: str
    type_size: int
    at: int
    """Where the codes are: 16 bytes whose low nibbles are weights 0..15, the high ones 16..31 (Q8_0: 32 bytes)."""
    sums: int
    """Sums of two products that add up in int16 without overflow; 0: signed codes, stored plus WIDE_OFFSET."""
    offset: int = 0
    """What codes are stored plus."""
    minimum: bool = False
    """Whether m (float16) follows d."""
    fifth_at: int = 0
    """Where the 32 fifth bits are, 0 for none."""
    table: str = ""
    """Name of the table that codes are looked up in."""
    exponent: bool = False
    """Whether d is a byte e for 2^(e - 128)."""


@inline
def fifth_bits(bits: Vector) -> Vector:
    """Bits 0..3 of each word, as 16 or 0 in its bytes 0..3: three copies 7 places apart, then one bit of each byte."""
    copies = mul(bit_and(bits, splat_ints(15)), splat_ints(0x00204081))
    return shift_left(bit_and(copies, splat_ints(0x01010101)), 4)


Q4_0 = Format32("q4_0", 18, at=2, sums=8, offset=8)
Q4_1 = Format32("q4_1", 20, at=4, sums=8, minimum=True)
Q5_0 = Format32("q5_0", 22, at=6, sums=4, offset=16, fifth_at=2)
Q5_1 = Format32("q5_1", 24, at=8, sums=4, minimum=True, fifth_at=4)
Q8_0 = Format32("q8_0", 34, at=2, sums=0)
IQ4_NL = Format32("iq4_nl", 18, at=2, sums=0, table="iq4")
MXFP4 = Format32("mxfp4", 17, at=1, sums=4, offset=12, table="mxfp4", exponent=True)
FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4)
