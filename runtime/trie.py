"""Token arrays -> a trie: which sequences lie side by side, and how many tokens neighbours share.

Compiled by numba. Every token is compared with itself, never a hash alone: a hash only finds the child to compare with.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tree_compile.runtime.sequences import Batch, IntArray, TokenArray, as_it_lies

__all__ = ["depth_first_order", "first_other_sequence"]

_CHUNK = 64
_COMPILED_TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def depth_first_order(batch: Batch, limits: IntArray) -> tuple[IntArray, IntArray]:
    """The sequences in an order that puts those with a common prefix side by side, and a prefix before its extensions.

    Args:
        batch: the sequences; arrays of one integer type are not copied.
        limits: tokens at the start of each sequence that others may share, int64 [number of sequences].

    Returns:
        Sequence ids, and the tokens that each shares with the one before it; both int64 [number of sequences].
    """
    arrays = _of_one_type(batch)
    return _order(_addresses(batch, arrays), batch.lengths, limits, _like(arrays))


def first_other_sequence(
    batch: Batch, segment_of: IntArray, starts: IntArray, parents: IntArray, sources: IntArray
) -> int:
    """The first sequence that does not spell the path to its segment; -1 where all do.

    Args:
        batch: the sequences.
        segment_of: the segment in which each ends, int64 [number of sequences].
        starts: position of the first token of each segment, int64 [S].
        parents: the segment above, -1 at a root, int64 [S].
        sources: a sequence that holds the segment, int64 [S].
    """
    arrays = _of_one_type(batch)
    addresses = _addresses(batch, arrays)
    tree = (np.require(array, np.int64, ["C", "A", "W"]) for array in (segment_of, starts, parents, sources))
    segment_of, starts, parents, sources = tree
    return int(_first_other_sequence(addresses, batch.lengths, segment_of, starts, parents, sources, _like(arrays)))


@numba.njit(cache=True)
def _first_other_sequence(addresses, lengths, segment_of, starts, parents, sources, like):
    for sequence in range(len(lengths)):
        segment, end = segment_of[sequence], lengths[sequence]
        while segment >= 0:
            begin = starts[segment]
            if _common_end(addresses, lengths, sources[segment], sequence, begin, end, like) < end:
                return sequence
            segment, end = parents[segment], begin
    return -1


def _addresses(batch: Batch, arrays: list[TokenArray]) -> IntArray:
    """Where the tokens of every sequence begin, by input: int64 [inputs, number of sequences]."""
    addresses = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
    return addresses.reshape(len(batch.inputs), -1)


def _of_one_type(batch: Batch) -> list[TokenArray]:
    """All arrays of all inputs, which the caller keeps as long as their addresses are used.

    numba compiles anew for every type, so that all but the two that tokens mostly have are converted.
    """
    arrays = [as_it_lies(array) for values in batch.inputs.values() for array in values]
    dtypes = {array.dtype.newbyteorder("=") for array in arrays}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
    if dtype not in _COMPILED_TYPES:
        dtype = np.dtype(np.int64)
    plain = [np.ascontiguousarray(array, dtype) for array in arrays]
    return [array if array.flags.aligned else array.copy() for array in plain]


def _like(arrays: list[TokenArray]) -> TokenArray:
    """An array that gives kernels the type alone: flags of the caller's arrays would be a part of it."""
    return np.empty(0, arrays[0].dtype)


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer, which `numba.carray` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    assert cgutils.voidptr_t == ir.IntType(8).as_pointer()
    return types.voidptr(address), generate


@numba.njit(cache=True)
def _array(address, length, like):
    return numba.carray(_pointer(address), (length,), like.dtype)  # type: ignore[attr-defined,call-arg]


@numba.njit(cache=True)
def _common_end(addresses, lengths, left, right, begin, end, like):
    """One past the last position from `begin` on at which two sequences agree in all inputs, at most `end`."""
    for row in range(addresses.shape[0]):
        a = _array(addresses[row, left], lengths[left], like)
        b = _array(addresses[row, right], lengths[right], like)
        at = begin
        while at < end:
            stop = min(at + _CHUNK, end)
            differing = 0
            for k in range(at, stop):  # without a branch, so that it is vectorised
                differing += a[k] != b[k]
            if differing:
                while a[at] == b[at]:
                    at += 1
                break
            at = stop
        end = min(end, at)
    return end


@numba.njit(cache=True)
def _slot(table, parent, addresses, lengths, sequence, at, sources, parents, like):
    """Where the child of `parent` that begins like `sequence` at `at` is in the hash table, or has to be put.

    All children of a node begin where it ends, which is `at`.
    """
    mixed = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)
    for row in range(addresses.shape[0]):
        value = np.uint64(np.int64(_array(addresses[row, sequence], lengths[sequence], like)[at]))
        mixed = (mixed ^ value) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    slot = np.int64(mixed & np.uint64(len(table) - 1))
    while table[slot] >= 0:
        node = table[slot]
        is_child = parents[node] == parent
        if is_child and _common_end(addresses, lengths, sources[node], sequence, at, at + 1, like) > at:
            return slot
        slot = (slot + 1) & (len(table) - 1)
    return slot


@numba.njit(cache=True)
def _order(addresses, lengths, limits, like):
    """Inserts the sequences one by one into a trie, and walks it; node 0 is above all roots."""
    count = len(lengths)
    trie = np.zeros((4, 3 * count + 1), np.int64)  # a sequence adds a segment, a part of its own, and splits one
    starts, ends, sources, parents = trie
    parents[0] = -1
    table, ends_in = _empty_table(trie.size), np.empty(count, np.int64)
    nodes = 1
    for sequence in range(count):
        node, at, limit = 0, 0, limits[sequence]
        while at < limit:
            slot = _slot(table, node, addresses, lengths, sequence, at, sources, parents, like)
            child = table[slot]
            if child < 0:
                table[slot] = _put(trie, nodes, at, limit, sequence, node)
                node, at, nodes = nodes, limit, nodes + 1
                continue
            at = _common_end(addresses, lengths, sources[child], sequence, at, min(ends[child], limit), like)
            if at < ends[child]:
                table[slot] = _put(trie, nodes, starts[child], at, sources[child], node)
                starts[child], parents[child] = at, nodes
                slot = _slot(table, nodes, addresses, lengths, sources[child], at, sources, parents, like)
                table[slot] = child
                child, nodes = nodes, nodes + 1
            node = child
        if at < lengths[sequence]:  # the rest is its own, and found by nobody
            node = _put(trie, nodes, at, lengths[sequence], sequence, node)
            nodes += 1
        ends_in[sequence] = node
    return _ordered_sequences(starts[:nodes], ends[:nodes], parents[:nodes], ends_in)


@numba.njit(cache=True)
def _empty_table(least):
    """A hash table of at least so many slots, a power of two, with nothing in them."""
    size = 16
    while size < least:
        size *= 2
    return np.full(size, -1, np.int64)


@numba.njit(cache=True)
def _put(trie, node, start, end, source, parent):
    """Writes a node of the trie; the node."""
    trie[0, node], trie[1, node], trie[2, node], trie[3, node] = start, end, source, parent
    return node


@numba.njit(cache=True)
def _chains(owner, owners):
    """Linked lists of what belongs to each owner, ascending: the first of each, and the next after each."""
    first, following = np.full(owners, -1, np.int64), np.full(len(owner), -1, np.int64)
    for item in range(len(owner) - 1, -1, -1):
        if owner[item] >= 0:
            following[item] = first[owner[item]]
            first[owner[item]] = item
    return first, following


@numba.njit(cache=True)
def _ordered_sequences(starts, ends, parents, ends_in):
    """Sequence ids in depth-first order, and the tokens that each shares with the one before it; [sequences] both."""
    child, sibling = _chains(parents, len(starts))
    sequence_of, sequence_after = _chains(ends_in, len(starts))
    order, shared = np.empty(len(ends_in), np.int64), np.empty(len(ends_in), np.int64)
    stack = np.empty(len(starts), np.int64)
    stack[0] = 0
    depth, found, common = 1, 0, 0
    while depth:
        depth -= 1
        node = stack[depth]
        common = min(common, starts[node])
        sequence = sequence_of[node]
        while sequence >= 0:
            order[found], shared[found] = sequence, common
            found, common, sequence = found + 1, ends[node], sequence_after[sequence]
        node = child[node]
        while node >= 0:
            stack[depth] = node
            depth, node = depth + 1, sibling[node]
    return order, shared
