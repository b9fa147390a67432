"""Random Unicode through a tokenizer and back."""

from __future__ import annotations

import random
from collections.abc import Callable

from edgellm.tokenizer import Tokenizer


def random_text(rng: random.Random, possible: Callable[[str], bool]) -> str:
    """Any Unicode but surrogates: plain letters, controls, marks, every plane."""
    kinds = (
        lambda: rng.randrange(0x20, 0x7F),
        lambda: rng.randrange(0x20),
        lambda: rng.randrange(0x300, 0x370),
        lambda: rng.randrange(0x80, 0xD800),
        lambda: rng.randrange(0xE000, 0x10000),
        lambda: rng.randrange(0x10000, 0x110000),
        lambda: rng.choice((0x20, 0x2581, 0x0A)),
    )
    letters = (chr(rng.choice(kinds)()) for _ in range(rng.randrange(1, 60)))
    return "".join(filter(possible, letters))


def check_round_trips(
    tokenizer: Tokenizer, seed: int, possible: Callable[[str], bool] = lambda letter: True, n: int = 300
) -> None:
    """Text to ids and back, whole and streamed, special parsing on and off; the tokens' bytes join to the text."""
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(n):
        text = random_text(rng, possible)
        for special in (False, True):
            ids = tokenizer.encode(text, special=special, bos=False)
            assert tokenizer.decode(ids, special=True) == text
        assert tokenizer.unk_id not in ids
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() in (text, " " + text)
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) + decoder.finish() == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
