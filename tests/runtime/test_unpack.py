"""Reading the sequences out of a row, and the gradients back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.batches import batches
from tests.runtime.pages import run_page
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.unpack import unpack_row

TREE = [[1, 2, 3], [1, 2, 4, 5], [1, 2], [1, 2, 3]]


def row_of(sequences):
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    return row, [row.path_ranges(i) for i in row.sequence_ids]


@given(batches(), st.sampled_from([(), (3,), (2, 3)]))
def test_values_and_gradients_are_those_of_indexing(sequences, width):
    row, ranges = row_of(sequences)
    value = torch.randn(row.length, *width, dtype=torch.float64, requires_grad=True)
    parts = unpack_row(value, ranges)
    expected = [value[torch.from_numpy(row.path(i))] for i in row.sequence_ids]
    weights = [torch.randn_like(part) for part in expected]
    for part, same in zip(parts, expected, strict=True):
        assert torch.equal(part, same)
    (grad,) = torch.autograd.grad(sum((w * p).sum() for w, p in zip(weights, parts, strict=True)), value)
    (want,) = torch.autograd.grad(sum((w * p).sum() for w, p in zip(weights, expected, strict=True)), value)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_gradients_are_numerically_right():
    row, ranges = row_of(TREE)
    value = torch.randn(row.length, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: tuple(unpack_row(v, ranges)), value)
    assert torch.autograd.gradgradcheck(lambda v: tuple(unpack_row(v, ranges)), value)


def test_sequences_without_a_gradient_are_skipped():
    row, ranges = row_of(TREE)
    value = torch.randn(row.length, requires_grad=True)
    unpack_row(value, ranges)[2].sum().backward()
    assert value.grad.tolist() == [1, 1, 0, 0, 0]


def test_no_gradient_where_no_sequence_has_one():
    row, ranges = row_of(TREE)
    value = torch.randn(row.length, requires_grad=True)
    other = torch.zeros(1, requires_grad=True)
    (unpack_row(value, ranges)[0].detach().sum() + other).backward()
    assert value.grad is None


class Allocations(TorchDispatchMode):
    """Counts the tensors of a size that ops return and that share memory with no input."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.count += out.untyped_storage().nbytes() >= self.size
        return out


def test_backward_allocates_one_tensor_as_long_as_the_row():
    row, ranges = row_of([[9] * 100 + [i] for i in range(50)])
    value = torch.randn(row.length, 8, requires_grad=True)
    loss = sum(part.square().sum() for part in unpack_row(value, ranges))
    with Allocations(value.nbytes) as row_sized:
        loss.backward()
    assert row_sized.count == 1


def test_unused_sequences_allocate_nothing_in_backward():
    counts = []
    for sequences in (2, 50):
        row, ranges = row_of([[9] * 100 + [i] for i in range(sequences)])
        value = torch.randn(row.length, 8, requires_grad=True)
        loss = unpack_row(value, ranges)[0].sum()
        with Allocations(100 * 8 * 4) as sequence_sized:
            loss.backward()
        counts.append(sequence_sized.count)
    assert counts[0] == counts[1]


def test_shared_tokens_can_be_changed_in_place_one_by_one():
    row, ranges = row_of(TREE)
    value = torch.zeros(row.length)
    parts = unpack_row(value, ranges)
    parts[0].add_(1)
    assert [part.sum().item() for part in parts] == [3, 0, 0, 0]
    assert not value.any()


@pytest.mark.parametrize("sequences", [TREE, [[1, 2, 3]], [[1, 2], [1, 2]]], ids=["tree", "alone", "duplicates"])
def test_changing_in_place_keeps_gradients_right(sequences):
    row, ranges = row_of(sequences)
    value = torch.randn(row.length, dtype=torch.float64, requires_grad=True)
    parts = unpack_row(value * 1, ranges)
    for part in parts:
        part.mul_(2)
    sum(parts[0]).backward()
    expected = torch.zeros(row.length, dtype=torch.float64)
    expected[torch.from_numpy(row.path(0))] = 2
    assert torch.equal(value.grad, expected)


def test_sequence_alone_in_its_row_is_a_view():
    value = torch.randn(8, 2)
    (part,) = unpack_row(value, [[(0, 5)]])
    assert part.shape == (5, 2)
    assert part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_any_dtype_is_unpacked(dtype):
    row, ranges = row_of(TREE)
    value = torch.from_numpy(row.tokens).to(dtype)
    parts = unpack_row(value, ranges)
    assert all(part.dtype == dtype for part in parts)
    assert torch.equal(parts[1], torch.tensor(TREE[1]).to(dtype))


def test_page_is_right():
    assert run_page("unpack.md")
