"""Tree attention by calls of flash attention, with kernels that are computed by their definition in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.runtime.attention_reference import tree_attention_reference
from tests.runtime.test_attention import FORESTS
from tests.runtime.trees import Spec, random_forest, segment_table
from tests.runtime.varlen_reference import reference_kernels
from tree_compile.runtime import flash_attention, flash_kernels
from tree_compile.runtime.flash_attention import flash_backward_op, flash_op, flash_tree_attention
from tree_compile.runtime.flash_calls import VarlenCall, pairs_of_calls, varlen_calls

TOLERANCE = 1e-12
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "sinks_and_softcap": {"sinks": True, "softcap": 1.5},
}


@pytest.fixture(autouse=True)
def _by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "kernels_for", reference_kernels)


def inputs(
    forest: list[Spec],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    padding: int = 0,
    sinks: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """query, key and value, the table of segments, and sinks where they are asked for."""
    generator = torch.Generator().manual_seed(0)
    table = segment_table(forest)
    tokens = int(table[:, 2].max()) + padding
    shapes = [(1, heads[0], tokens, widths[0]), (1, heads[1], tokens, widths[0]), (1, heads[1], tokens, widths[1])]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    sink = torch.randn(heads[0], generator=generator, dtype=torch.float64).requires_grad_() if sinks else None
    return made, table, sink


def largest_error(forest: list[Spec], softcap: float = 0.0, **options: object) -> float:
    """Greatest difference from the definition, of the output and of all gradients."""
    made, table, sink = inputs(forest, **options)
    out = flash_tree_attention(*made, table, sink, 0.4, softcap)
    expected = tree_attention_reference(*made, table, scale=0.4, softcap=softcap, sinks=sink)
    leaves = made if sink is None else [*made, sink]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(out, leaves, grad)
    pairs = [(out, expected), *zip(found, torch.autograd.grad(expected, leaves, grad), strict=True)]
    return max((left - right).abs().max().item() for left, right in pairs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_flash_calls_equal_the_definition_on_every_tree(forest: list[Spec], options: dict[str, object]) -> None:
    assert largest_error(forest, **options) < TOLERANCE


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_flash_calls_equal_the_definition_on_random_trees_with_padding(seed: int, options: dict[str, object]) -> None:
    rng = random.Random(seed)
    forest = random_forest(rng, rng.choice([20, 200]), rng.choice([1, 5, 40]))
    assert largest_error(forest, padding=rng.choice([0, 7]), **options) < TOLERANCE


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("widths", [(1, 1), (7, 7), (24, 16), (3, 10)])
def test_flash_takes_any_number_of_heads_and_any_width(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    assert largest_error(FORESTS["long_siblings"], heads=heads, widths=widths, sinks=True) < TOLERANCE


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("forest", ["long_siblings", "random_long", "one_token_segments"])
def test_without_the_calls_of_the_depths_it_is_far_off(
    forest: str, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "varlen_calls", lambda *given: varlen_calls(*given)[:1])
    assert largest_error(FORESTS[forest], softcap) > 1e10 * TOLERANCE


def test_padding_rows_give_zero_and_receive_zero() -> None:
    made, table, _ = inputs(FORESTS["several_roots"], padding=6)
    out = flash_tree_attention(*made, table, None, 0.4, 0.0)
    for tensor in (out, *torch.autograd.grad(out, made, torch.ones_like(out))):
        assert tensor[:, :, -6:].abs().max() == 0
        assert tensor[:, :, :-6].abs().max() > 0


def test_log_sum_exp_is_that_of_all_visible_keys() -> None:
    made, table, sink = inputs(FORESTS["random_long"], sinks=True, heads=(2, 2))
    _, lse = flash_op(*made, table, sink, 0.4, 0.0)
    ones = torch.ones_like(made[2])
    # A sink takes what the keys leave of the weights, which are 1 in all without one.
    left = 1 - tree_attention_reference(made[0], made[1], ones, table, scale=0.4, sinks=sink)[..., 0]
    assert ((sink[:, None] - lse).exp() - left).abs().max() < TOLERANCE


# The calls


@pytest.mark.parametrize("seed", range(20))
def test_calls_cover_every_visible_pair_once(seed: int) -> None:
    rng = random.Random(seed)
    table = segment_table(random_forest(rng, 120, rng.choice([1, 4, 30])))
    tokens = int(table[:, 2].max())
    covered = torch.zeros(tokens, tokens, dtype=torch.int64)
    for pairs in pairs_of_calls(table.numpy()):
        for queries, keys in zip(pairs.queries.tolist(), pairs.keys.tolist(), strict=True):
            block = torch.ones(queries[1] - queries[0], keys[1] - keys[0], dtype=torch.int64)
            covered[slice(*queries), slice(*keys)] += block.tril() if pairs.causal else block
    rows = torch.arange(tokens)
    lengths = table[:, 1] - table[:, 0]
    ends = table[:, 2].repeat_interleave(lengths)
    assert torch.equal(covered, ((rows <= rows[:, None]) & (rows[:, None] < ends)).long())


def test_contiguous_rows_are_not_gathered() -> None:
    calls = varlen_calls(segment_table([(9, [(3, [(2, [])]), (4, [])])]), torch.device("cpu"))
    assert [(call.queries, call.keys) for call in calls[:2]] == [
        (slice(0, 18), slice(0, 18)),
        (slice(9, 18), slice(0, 9)),
    ]
    assert [call.causal for call in calls] == [True, False, False]


def test_tables_of_all_calls_are_views_of_one_buffer() -> None:
    calls = varlen_calls(segment_table(FORESTS["random_short"]), torch.device("cpu"))
    tensors = [value for call in calls for value in vars(call).values() if isinstance(value, Tensor)]
    assert len(tensors) > 2 * len(calls)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


# As an operator


@pytest.mark.parametrize("sinks", [False, True])
def test_flash_op_passes_the_library_checks(sinks: bool) -> None:
    made, table, sink = inputs([(5, [(3, []), (2, [])])], widths=(8, 5), sinks=sinks, padding=1)
    torch.library.opcheck(flash_op, (*made, table, sink, 0.4, 0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_results_have_the_strides_and_dtypes_of_real_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "kernels_for", rounded_kernels)
    made, table, sink = inputs([(5, [(3, []), (2, [])])], widths=(8, 5), sinks=True)
    values = [*(tensor.detach().to(dtype) for tensor in made), table, sink.detach().to(dtype), 0.4, 0.0]
    out, lse = flash_op(*values)
    back = [torch.randn_like(out), *values[:3], out, lse, *values[3:]]
    with FakeTensorMode() as mode:
        faked, faked_back = (
            [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in own] for own in (values, back)
        )
        fake = [*flash_op(*faked), *flash_backward_op(*faked_back)]
    for left, right in zip([out, lse, *flash_backward_op(*back)], fake, strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


def rounded_kernels(softcap: float) -> flash_kernels.FlashKernels:
    """The definition with inputs and outputs in the precision of the kernels: lse in float32, the rest as given."""
    exact = reference_kernels(softcap)

    def forward(query: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        wide = [value.double() if isinstance(value, Tensor) else value for value in (query, *rest)]
        out, lse = exact.forward(*wide)
        return out.to(query.dtype), lse.to(torch.promote_types(query.dtype, torch.float32))

    def backward(grad: Tensor, *rest: object) -> tuple[Tensor, ...]:
        wide = [value.double() if isinstance(value, Tensor) else value for value in (grad, *rest)]
        return tuple(gradient.to(grad.dtype) for gradient in exact.backward(*wide))

    return flash_kernels.FlashKernels(forward, backward)


def test_half_precision_is_within_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "kernels_for", rounded_kernels)
    exact, table, _ = inputs(FORESTS["random_long"])
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    with torch.no_grad():
        for tensor, rounded in zip(exact, low, strict=True):
            tensor.copy_(rounded)
    out, expected = (
        flash_tree_attention(*low, table, None, 0.4, 0.0),
        tree_attention_reference(*exact, table, scale=0.4),
    )
    assert out.dtype == torch.bfloat16
    grad = torch.randn_like(out)
    found, wanted = torch.autograd.grad(out, low, grad), torch.autograd.grad(expected, exact, grad.double())
    for left, right in [(out, expected), *zip(found, wanted, strict=True)]:
        assert (left - right).abs().max() < 0.02 * right.abs().max()


def test_compiled_graph_serves_new_trees_and_lengths() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return flash_tree_attention(2 * query, key, value, table, None, 0.4, 0.0).sin().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    before = 0
    for seed in range(5):
        made, table, _ = inputs(random_forest(random.Random(seed), 60 + 40 * seed, 20))
        found, expected = compiled(*made, table), model(*made, table)
        gradients = zip(torch.autograd.grad(found, made), torch.autograd.grad(expected, made), strict=True)
        assert all(torch.equal(left, right) for left, right in gradients)
        before = int(counter.frame_count) if seed < 2 else before
    assert counter.frame_count == before > 0


# The real kernels, as far as their schemas and shapes go


def fake_call(tokens: int) -> VarlenCall:
    offsets = torch.empty(4, dtype=torch.int32, device="cuda")
    return VarlenCall(slice(0, tokens), slice(0, tokens), offsets, offsets, 7, 7, True)


def test_torch_kernels_take_the_arguments_and_give_the_shapes_that_the_op_reads() -> None:
    with FakeTensorMode():
        query, key = (torch.empty(17, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        kernels = flash_kernels.kernels_for(0.0)
        out, lse = kernels.forward(query, key, key, fake_call(17), 0.4)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        assert (lse.shape, lse.dtype) == ((4, 17), torch.float32)
        gradients = kernels.backward(out, query, key, key, out, lse, fake_call(17), 0.4)
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_torch_kernels_get_each_argument_under_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]
    seen: dict[str, object] = {}

    def record(*args: object, **options: object) -> tuple[object, ...]:
        seen.update(dict(zip(names, args, strict=False)) | options)
        return (None,) * len(schema.returns)

    monkeypatch.setattr(torch.ops.aten, name, record)
    call = VarlenCall(slice(0, 3), slice(0, 2), "queries", "keys", 30, 20, True)
    tensors = {"query": torch.zeros(3, 4, 8), "key": torch.zeros(2, 2, 8), "value": torch.ones(2, 2, 8)}
    if name.endswith("backward"):
        whole = {"out": torch.zeros(3, 4, 8), "logsumexp": torch.zeros(4, 3)}
        upper = torch.zeros(3, 4, 8)
        flash_kernels.kernels_for(0.0).backward(upper, *tensors.values(), *whole.values(), call, 0.4)
        assert seen["grad_out"] is upper
        assert all(seen[key] is value for key, value in whole.items())
    else:
        flash_kernels.kernels_for(0.0).forward(*tensors.values(), call, 0.4)
        assert seen["return_debug_mask"] is False
    expected = {"cum_seq_q": "queries", "cum_seq_k": "keys", "max_q": 30, "max_k": 20, "dropout_p": 0.0, "scale": 0.4}
    assert seen["is_causal"] is True
    assert all(seen[key] is value for key, value in tensors.items())
    assert {key: seen[key] for key in expected} == expected


class Recorder:
    """Functions with the arguments of flash-attn 2.7 and 2.8, which keep what they get."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        self.seen = dict(locals())
        return q, "lse", None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        self.seen = dict(locals())


def test_soft_cap_goes_to_flash_attn_with_each_argument_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder()
    monkeypatch.setattr(flash_kernels.importlib, "import_module", lambda _: package)
    call = VarlenCall(slice(0, 3), slice(0, 2), "queries", "keys", 30, 20, False)
    query, key, value = torch.zeros(3, 4, 8), torch.zeros(2, 2, 8), torch.ones(2, 2, 8)
    kernels = flash_kernels.kernels_for(5.0)
    expected = {"cu_seqlens_q": "queries", "cu_seqlens_k": "keys", "max_seqlen_q": 30, "max_seqlen_k": 20}
    expected |= {"dropout_p": 0.0, "softmax_scale": 0.4, "softcap": 5.0, "causal": False, "window_size_left": -1}
    out, lse = kernels.forward(query, key, value, call, 0.4)
    assert (out is query, lse) == (True, "lse")
    assert expected == {name: package.seen[name] for name in expected}
    gradients = kernels.backward(query, query, key, value, query, "lse", call, 0.4)
    assert expected == {name: package.seen[name] for name in expected}
    assert all(package.seen[name] is given for name, given in [("q", query), ("k", key), ("v", value)])
    assert all(package.seen[name] is made for name, made in zip(("dq", "dk", "dv"), gradients, strict=True))
