"""Dequantisers against the `gguf` package, bit for bit; types it lacks against blocks made by hand."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from edgellm.backends import dequant
from edgellm.backends.dequant import dequantise
from edgellm.errors import UnsupportedModel
from edgellm.quants import QUANT_TABLE, GGMLType

PACKAGE_TYPES = [t for t in GGMLType if t.value in gguf.quants._type_traits]
HAND_MADE = {"Q8_1", "Q8_K", "Q1_0", "Q2_0", "F64", "I8", "I16", "I32", "I64", "F32", "F16"}


def random_blocks(type: GGMLType, n: int, seed: int) -> np.ndarray:
    """Any bytes are a block; those whose float16 fields came out as NaN or infinity are left out by the caller."""
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(0, 256, (n, QUANT_TABLE[type].type_size), np.uint8)


@pytest.mark.parametrize("type", PACKAGE_TYPES, ids=lambda t: t.name)
def test_equal_to_the_gguf_package_bit_for_bit(type: GGMLType) -> None:
    blocks = random_blocks(type, 600, seed=type.value)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type.value))
        found = dequantise(blocks, type)
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() > 100
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_every_type_is_covered_here() -> None:
    assert {t.name for t in PACKAGE_TYPES} | HAND_MADE == {t.name for t in GGMLType}


def test_shape_is_kept_and_rows_hold_several_blocks() -> None:
    blocks = random_blocks(GGMLType.Q8_0, 12, seed=1).reshape(2, 3, 68)
    blocks[..., [1, 35]] = 0x3C
    assert dequantise(blocks, GGMLType.Q8_0).shape == (2, 3, 64)


def hand(type: GGMLType, data: bytes) -> list[float]:
    assert len(data) == QUANT_TABLE[type].type_size * max(1, len(data) // QUANT_TABLE[type].type_size)
    return dequantise(np.frombuffer(data, np.uint8).reshape(1, -1), type)[0].tolist()


def test_one_bit_blocks_by_hand() -> None:
    values = hand(GGMLType.Q1_0, struct.pack("<e", 0.5) + bytes([0b00000101] + [0] * 15))
    assert values == [0.5, -0.5, 0.5] + [-0.5] * 125


def test_two_bit_blocks_by_hand() -> None:
    """Laid out as in ggml's `dequantize_row_q2_0`; with such an embedding llama.cpp's logits were equal."""
    values = hand(GGMLType.Q2_0, struct.pack("<e", 0.5) + bytes([0b11100100, 0b00000011] + [0b01010101] * 14))
    assert values == [-0.5, 0.0, 0.5, 1.0, 1.0, -0.5, -0.5, -0.5] + [0.0] * 56


def test_activation_blocks_by_hand() -> None:
    q = list(range(-16, 16))
    assert hand(GGMLType.Q8_1, struct.pack("<ff32b", 0.25, 9.0, *q)) == [0.25 * x for x in q]
    q = [(7 * i) % 255 - 127 for i in range(256)]
    assert hand(GGMLType.Q8_K, struct.pack("<f256b16h", 0.5, *q, *[0] * 16)) == [0.5 * x for x in q]


@pytest.mark.parametrize(
    "code,name", [("d", "F64"), ("b", "I8"), ("h", "I16"), ("i", "I32"), ("q", "I64"), ("f", "F32"), ("e", "F16")]
)
def test_plain_numbers_by_hand(code: str, name: str) -> None:
    assert hand(GGMLType[name], struct.pack(f"<3{code}", 3, -2, 100)) == [3.0, -2.0, 100.0]


def test_type_without_a_definition_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dequant._FUNCTIONS, GGMLType.Q4_0)
    with pytest.raises(UnsupportedModel, match="Q4_0"):
        dequantise(np.zeros((1, 18), np.uint8), GGMLType.Q4_0)
