"""The ggml type table: how many weights a block holds, how many bytes it takes, and how it is laid out.

Numbers follow ggml's `ggml_type` enum and block structs; a test compares this table with the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

__all__ = ["QUANT_TABLE", "GGMLType", "QTensor", "TypeInfo"]


class GGMLType(IntEnum):
    """ggml tensor types by their number in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class TypeInfo(NamedTuple):
    """Weights per block, bytes per block, and the block layout in words."""

    block_size: int
    type_size: int
    layout: str


QUANT_TABLE: dict[GGMLType, TypeInfo] = {
    GGMLType.F32: TypeInfo(1, 4, "float32"),
    GGMLType.F16: TypeInfo(1, 2, "float16"),
    GGMLType.Q4_0: TypeInfo(32, 18, "f16 d; 16 bytes: low nibbles are weights 0..15, high 16..31; w = d (q - 8)"),
    GGMLType.Q4_1: TypeInfo(32, 20, "f16 d, f16 m; 16 bytes of nibbles as Q4_0; w = d q + m"),
    GGMLType.Q5_0: TypeInfo(32, 22, "f16 d; u32 fifth bits; 16 bytes of nibbles; w = d (q - 16)"),
    GGMLType.Q5_1: TypeInfo(32, 24, "f16 d, f16 m; u32 fifth bits; 16 bytes of nibbles; w = d q + m"),
    GGMLType.Q8_0: TypeInfo(32, 34, "f16 d; 32 int8; w = d q"),
    GGMLType.Q8_1: TypeInfo(32, 40, "f16 d, f16 s = d sum(q); 32 int8 (activations only)"),
    GGMLType.Q2_K: TypeInfo(
        256, 84, "16 bytes of 4-bit scale and min; 64 bytes of 2-bit q; f16 d, f16 dmin; w = d sc q - dmin m"
    ),
    GGMLType.Q3_K: TypeInfo(
        256,
        110,
        "32 bytes high bits; 64 of 2-bit q; 12 of 6-bit scales; f16 d; w = d (sc - 32) (q, less 4 without high bit)",
    ),
    GGMLType.Q4_K: TypeInfo(
        256, 144, "f16 d, f16 dmin; 12 bytes: 8 x 6-bit scale and min; 128 bytes of nibbles; w = d sc q - dmin m per 32"
    ),
    GGMLType.Q5_K: TypeInfo(
        256, 176, "f16 d, f16 dmin; 12 bytes of scales as Q4_K; 32 bytes of fifth bits; 128 bytes of nibbles"
    ),
    GGMLType.Q6_K: TypeInfo(
        256, 210, "128 bytes low nibbles; 64 bytes high 2 bits; 16 int8 scales (per 16); f16 d; w = d sc (q - 32)"
    ),
    GGMLType.Q8_K: TypeInfo(256, 292, "f32 d; 256 int8; 16 int16 sums (activations only)"),
    GGMLType.IQ2_XXS: TypeInfo(256, 66, "see the gguf package"),
    GGMLType.IQ2_XS: TypeInfo(256, 74, "see the gguf package"),
    GGMLType.IQ3_XXS: TypeInfo(256, 98, "see the gguf package"),
    GGMLType.IQ1_S: TypeInfo(256, 50, "see the gguf package"),
    GGMLType.IQ4_NL: TypeInfo(32, 18, "f16 d; 16 bytes of nibbles into a table of 16 values"),
    GGMLType.IQ3_S: TypeInfo(256, 110, "see the gguf package"),
    GGMLType.IQ2_S: TypeInfo(256, 82, "see the gguf package"),
    GGMLType.IQ4_XS: TypeInfo(
        256, 136, "f16 d; u16 high scale bits; 4 bytes low scale bits; 128 bytes of nibbles into the IQ4_NL table"
    ),
    GGMLType.I8: TypeInfo(1, 1, "int8"),
    GGMLType.I16: TypeInfo(1, 2, "int16"),
    GGMLType.I32: TypeInfo(1, 4, "int32"),
    GGMLType.I64: TypeInfo(1, 8, "int64"),
    GGMLType.F64: TypeInfo(1, 8, "float64"),
    GGMLType.IQ1_M: TypeInfo(256, 56, "see the gguf package"),
    GGMLType.BF16: TypeInfo(1, 2, "bfloat16: the upper half of a float32"),
    GGMLType.TQ1_0: TypeInfo(256, 54, "see the gguf package"),
    GGMLType.TQ2_0: TypeInfo(256, 66, "see the gguf package"),
    GGMLType.MXFP4: TypeInfo(
        32, 17, "u8 e8m0 exponent; 16 bytes of nibbles into the E2M1 table (doubled, exponent halved)"
    ),
    GGMLType.NVFP4: TypeInfo(64, 36, "see the gguf package"),
    GGMLType.Q1_0: TypeInfo(128, 18, "see the gguf package"),
    GGMLType.Q2_0: TypeInfo(64, 18, "f16 d; 16 bytes of 2-bit q, weight 4 i + j in bits 2 j of byte i; w = d (q - 1)"),
}


@dataclass(frozen=True)
class QTensor:
    """A weight as the file holds it: `shape` in numpy order (rows first, experts before rows; GGUF's `ne` reversed).

    `data` is uint8 of shape (*shape[:-1], row_bytes): a view of the memory map, never a copy.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of `shape[-1]` weights."""
        info = QUANT_TABLE[self.type]
        return self.shape[-1] // info.block_size * info.type_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return int(self.data.nbytes)

    def rows(self, start: int, stop: int) -> QTensor:
        """Rows `start..stop` of a 2-D weight, or values of a vector, as a view (fused q/k/v or gate/up tensors are
        split this way)."""
        vector = len(self.shape) == 1
        data = self.data.reshape(self.shape[0], -1)[start:stop].reshape(-1) if vector else self.data[start:stop]
        return QTensor(f"{self.name}[{start}:{stop}]", self.type, (stop - start, *self.shape[1:]), data)
