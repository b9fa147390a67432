"""What a stream has told is what the answer is in the end, wherever stop strings cut it."""

from __future__ import annotations

import random

from edgellm.engine.output import TextOutput, TokenLogprobs
from edgellm.tokenizer.stream import StreamDecoder


def test_no_token_is_told_that_a_stop_string_takes_away() -> None:
    """Tokens of random bytes of a text: characters begin in one and end in another."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        data = "".join(rng.choice("abé漢🦙") for _ in range(20)).encode()
        pieces, at = list[bytes](), 0
        while at < len(data):
            pieces.append(data[at : at + rng.randint(0, 4)])
            at += len(pieces[-1])
        stop = "".join(rng.choice("abé漢🦙") for _ in range(rng.randint(1, 3)))
        output = TextOutput(StreamDecoder(pieces.__getitem__, False), (stop,))
        text, ids = "", list[int]()
        for i, piece in enumerate(pieces):
            ended = output.push(i, TokenLogprobs(i, "", piece, 0.0))
            if ended or i == len(pieces) - 1:
                output.finish()
            more, tokens, logprobs = output.take()
            text, ids = text + more, [*ids, *tokens]
            assert [p.id for p in logprobs] == list(tokens)
            if ended:
                break
        assert text == output.text == data.decode().split(stop)[0]
        assert ids == output.ids == [p.id for p in output.logprobs]
        assert b"".join(p.bytes for p in output.logprobs) == text.encode()
