"""Arguments of every matrix kernel: byte offsets into its int64 array.

y[token, row] = sum over k of W[row, k] x[token, k] (+ bias[row]). W is in the file's own bytes, rows `ROW_BYTES` apart;
x is quantised as quantise.py lays it out (Q, SUMS, D).
"""

from __future__ import annotations

WEIGHTS, ROW_BYTES, N_ROWS, N_BLOCKS = 0, 8, 16, 24
Q, SUMS, D = 32, 40, 48
N_TOKENS, ALL_PANELS = 56, 64
"""Tokens to do, and panels from one block of x to the next (more than those of N_TOKENS if others lie in between)."""
OUT, OUT_STRIDE, BIAS, ORDER = 72, 80, 88, 96
"""OUT_STRIDE: bytes between tokens of the output. BIAS: address of float32 (n_rows,), or 0. ORDER: address of int32
(N_TOKENS,), the output row of each token, or 0 when that is its number."""
COUNT = 13
