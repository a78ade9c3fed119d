"""The leaves of a tree, their order, and what they share."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import batches, segment_path, tree_of
from tree_compile.runtime.leaves import depth_first, leaves_of, shared_tokens


@given(batches())
def test_any_two_leaves_share_the_least_between_them(sequences):
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    for left, right in itertools.combinations(range(len(leaves)), 2):
        common = set(segment_path(tree, leaves.segment[left])) & set(segment_path(tree, leaves.segment[right]))
        expected = sum(int(tree.length[segment]) for segment in common)
        assert shared_tokens(leaves.minima, left, right) == expected


@given(batches(), st.randoms())
def test_depth_first_order_keeps_subtrees_together(sequences, random):
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    order, shared = depth_first(tree, np.array([random.random() for _ in range(len(tree))]))
    assert sorted(order.tolist()) == list(range(len(leaves)))
    for segment in range(len(tree)):
        inside = [segment in segment_path(tree, leaves.segment[leaf]) for leaf in order]
        assert sum(a != b for a, b in itertools.pairwise([False, *inside, False])) == 2
    for (one, other), tokens in zip(itertools.pairwise(order), shared[1:], strict=True):
        assert shared_tokens(leaves.minima, min(one, other), max(one, other)) == tokens
