"""Random batches of sequences that share prefixes."""

from __future__ import annotations

import random

Sequences = list[list[int]]


def random_sequences(seed: int, vocabulary: int, depth: int = 8) -> Sequences:
    """Some 15 sequences of up to about 60 tokens.

    They have several roots, branches down to `depth`, segments of one token, a duplicate, and a strict prefix of
    another sequence.
    """
    rng = random.Random(seed)
    paths: list[tuple[int, list[int]]] = [(0, _draw(rng, 6, vocabulary)), (0, _draw(rng, 1, vocabulary))]
    sequences: Sequences = []
    while paths:
        level, path = paths.pop()
        branches = rng.choice((0, 2, 2, 3)) if level else 2
        if level == depth or len(sequences) > 12 or branches == 0:
            sequences.append(path)
            continue
        for token in rng.sample(range(vocabulary), branches):
            tail = [token, *_draw(rng, rng.choice((0, 0, 3, 9)), vocabulary)]
            paths.append((level + 1, path + tail))
    longest = max(sequences, key=len)
    sequences += [list(longest), longest[: len(longest) // 2]]
    rng.shuffle(sequences)
    return sequences


def deep_sequences(seed: int, vocabulary: int) -> Sequences:
    """A trunk with a leaf at each of 8 depths."""
    rng = random.Random(seed)
    trunk, sequences = _draw(rng, 5, vocabulary), []
    for _ in range(8):
        first, other = rng.sample(range(vocabulary), 2)
        sequences.append([*trunk, first, *_draw(rng, rng.choice((0, 4)), vocabulary)])
        trunk = [*trunk, other, *_draw(rng, rng.choice((0, 2, 6)), vocabulary)]
    return [*sequences, trunk]


def _draw(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def long_sequences(seed: int, vocabulary: int) -> Sequences:
    """Some 10 sequences of up to about 350 tokens, whose segments have 1 token or about 32, 64 or 128."""
    rng = random.Random(seed)
    lengths = (1, 31, 32, 33, 63, 64, 65, 130)
    sequences: Sequences = [_draw(rng, 300, vocabulary), _draw(rng, 1, vocabulary)]
    while len(sequences) < 10:
        base = max((rng.choice(sequences) for _ in range(2)), key=len)
        kept = base[: rng.choice([at for at in (0, *lengths, 128, 256) if at <= len(base)])]
        sequences.append(kept + _draw(rng, rng.choice(lengths), vocabulary))
    return [*sequences, list(sequences[4]), sequences[0][:70]]
