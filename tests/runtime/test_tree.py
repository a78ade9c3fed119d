"""The prefix tree of a batch."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import batches, chain, tree_segments
from tests.runtime.pages import run_page
from tree_compile.runtime.sequences import as_batch
from tree_compile.runtime.tree import build_prefix_tree


def as_segments(tree, sequences):
    """The tree in the form of the reference: each segment by its start and the path down to its end."""
    names = [
        (start, tuple(sequences[source][:end]))
        for start, end, source in zip(tree.start.tolist(), tree.end.tolist(), tree.source.tolist(), strict=True)
    ]
    return {name: names[above] if above >= 0 else None for name, above in zip(names, tree.parent.tolist(), strict=True)}


@given(batches(), st.integers(1, 3), st.data())
def test_tokens_from_a_limit_on_are_shared_with_none(sequences, min_shared_tokens, data):
    limits = [data.draw(st.integers(0, len(sequence))) for sequence in sequences]
    tree = build_prefix_tree(as_batch(sequences), min_shared_tokens, np.array(limits))
    # With its number on them, they are no sequence's else.
    own = [
        tuple((token, -1 if at < limits[i] else i) for at, token in enumerate(sequence))
        for i, sequence in enumerate(sequences)
    ]
    assert as_segments(tree, own) == tree_segments(own, min_shared_tokens)


# Tokens are compared in pieces of 64: tokens that are repeated 128 times put the branches on their edges.
@given(batches(), st.integers(1, 5), st.sampled_from([1, 128]), st.lists(st.sampled_from("bhiqBHIQ"), min_size=1))
def test_tree_has_the_segments_of_the_published_procedure(sequences, min_shared_tokens, repeat, types):
    arrays = [np.repeat(sequence, repeat).astype(types[i % len(types)]) for i, sequence in enumerate(sequences)]
    sequences = [tuple(array.tolist()) for array in arrays]
    tree = build_prefix_tree(as_batch(arrays), min_shared_tokens * repeat)
    expected = tree_segments(sequences, min_shared_tokens * repeat)
    assert as_segments(tree, sequences) == expected
    assert len(tree) == len(expected)


@given(batches(), batches(), st.integers(1, 4))
def test_tree_shares_only_where_all_inputs_agree(sequences, payloads, min_shared_tokens):
    payloads = [np.resize(payloads[i % len(payloads)], len(tokens)).tolist() for i, tokens in enumerate(sequences)]
    tree = build_prefix_tree(as_batch({"input_ids": sequences, "kind": payloads}), min_shared_tokens)
    pairs = [tuple(zip(*both, strict=True)) for both in zip(sequences, payloads, strict=True)]
    assert as_segments(tree, pairs) == tree_segments(pairs, min_shared_tokens)


@given(batches(), st.integers(1, 4))
def test_segments_are_in_pre_order(sequences, min_shared_tokens):
    tree = build_prefix_tree(as_batch(sequences), min_shared_tokens)
    parent = tree.parent.tolist()
    for segment in range(len(tree)):
        below = {segment}
        for other in range(segment + 1, len(tree)):
            if parent[other] in below:
                below.add(other)
        assert below == set(range(segment, int(tree.subtree_end[segment])))


@given(batches(), st.integers(1, 4))
def test_sequence_ends_in_its_segment(sequences, min_shared_tokens):
    tree = build_prefix_tree(as_batch(sequences), min_shared_tokens)
    for i, sequence in enumerate(sequences):
        segment = tree.sequence_segment[i]
        assert tree.start[segment] < len(sequence) <= tree.end[segment]
        assert sequences[tree.source[segment]][: len(sequence)] == sequence
        assert tree.leaves[tree.sequence_leaf[i]] in range(segment, tree.subtree_end[segment])


@given(batches(most=16), st.integers(1, 3))
def test_path_leaves_the_first_child_at_most_log2_leaves_times(sequences, min_shared_tokens):
    tree = build_prefix_tree(as_batch(sequences), min_shared_tokens)
    for leaf in tree.leaves.tolist():
        jumps, segment = 0, leaf
        while segment >= 0:
            jumps += bool(tree.parent[segment] != segment - 1)
            segment = tree.parent[segment]
        assert jumps <= 1 + math.log2(len(tree.leaves))


def test_siblings_of_one_size_keep_the_order_of_the_batch():
    tree = build_prefix_tree(as_batch([[9], [5, 3], [7], [5, 5], [5, 4], [1]]), 1)
    assert [tree.source[leaf] for leaf in tree.leaves] == [1, 3, 4, 0, 2, 5]


def test_duplicates_share_a_leaf_however_short():
    tree = build_prefix_tree(as_batch([[4], [4], [4]]))
    assert len(tree) == 1
    assert tree.sequence_segment.tolist() == [0, 0, 0]


def test_strict_prefix_makes_no_segment():
    tree = build_prefix_tree(as_batch([[1, 2, 3, 4], [1, 2]]))
    assert tree.length.tolist() == [4]


def test_segment_is_shared_from_64_tokens_on():
    def segments(shared):
        return len(build_prefix_tree(as_batch([[7] * shared + [1], [7] * shared + [2]])))

    assert (segments(63), segments(64)) == (2, 3)


def test_chain_of_5000_segments_is_built():
    tree = build_prefix_tree(as_batch(chain(5_000)), 1)
    assert len(tree) == 2 * 5_000 - 1
    assert int(tree.length.sum()) == 5_000 + 4_999


def test_chain_of_5000_prefixes_is_one_segment():
    trunk = np.arange(5_000)
    tree = build_prefix_tree(as_batch([trunk[: 1 + end] for end in range(5_000)]))
    assert tree.length.tolist() == [5_000]
    assert not tree.sequence_segment.any()


def test_airline_rollouts_have_the_known_number_of_unique_tokens(airline_rollouts):
    assert int(build_prefix_tree(as_batch(airline_rollouts), 1).length.sum()) == 452_127


def test_page_is_right():
    assert run_page("tree.md")
