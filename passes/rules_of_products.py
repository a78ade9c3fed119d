"""Rules of operators that compute along some dimensions: sums, softmax, norms, products, and tree attention."""

from __future__ import annotations

import torch

from tree_compile.passes.axes import TOKENS, Axis, Mixes, Value, broadcast, unify
from tree_compile.passes.nodes import einsum_letters
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.token_rules import RULES, Result, Rule, Step, operators, rule
from tree_compile.runtime.attention import tree_attention

# Along some dimensions


def along(what: str) -> Rule:
    """The rule of an operator that `what` along its argument `dim`, or along all dimensions where none is given."""

    def refuse_tokens(step: Step) -> Result:
        known = step.value("self")
        dims = step.dims_or_all(step.arguments.get("dim"), len(known.axes))
        if any(known.axes[dim] is not None for dim in dims):
            raise Mixes(f"it {what} along the tokens")
        kept = step.arguments.get("keepdim", False)
        removed = set() if kept or not _reduces(step) else dims
        axes = tuple(axis for dim, axis in enumerate(known.axes) if dim not in removed)
        result = Value(axes)
        results = step.node.meta["val"]
        return (result,) * len(results) if isinstance(results, (tuple, list)) else result

    return refuse_tokens


def _reduces(step: Step) -> bool:
    value = step.node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return len(first.shape) < len(shape_of(step["self"]))


for _operator in operators(
    "sum mean amax amin max min prod any all argmax argmin logsumexp norm linalg_vector_norm std var std_mean "
    "var_mean median mode kthvalue count_nonzero nansum nanmean"
):
    if torch.Tag.pointwise not in _operator.tags:
        RULES[_operator] = along("reduces")
rule("linalg_norm aminmax quantile.scalar")(along("reduces"))
rule("glu")(along("halves"))
rule("softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax")(along("takes a softmax"))
rule("cumprod cummax cummin logcumsumexp")(along("accumulates"))
rule("topk")(along("selects"))


@rule("diff")
def _diff(step: Step) -> Value:
    """Entries may be put before and after those of `self`."""
    joined = [step.value(name) for name in ("self", "prepend", "append")]
    axes = broadcast(joined)
    if axes[step.dim(step["dim"], len(axes))] is not None:
        raise Mixes("it subtracts neighbours along the tokens")
    return Value(axes)


@rule("layer_norm rms_norm _fused_rms_norm native_layer_norm")
def _layer_norm(step: Step) -> Value:
    known = step.value("input")
    if any(axis is not None for axis in known.axes[-len(step["normalized_shape"]) :]):
        raise Mixes("it normalizes over the tokens")
    step.require_no_tokens("weight", "bias")
    return known


@rule("batch_norm")
def _batch_norm(step: Step) -> Value:
    known = step.value("input")
    if step["training"] or known.axes[1] is not None:
        raise Mixes("it normalizes over the tokens of the batch")
    step.require_no_tokens(*_OF_CHANNELS)
    return known


@rule("group_norm instance_norm")
def _group_norm(step: Step) -> Value:
    known = step.value("input")
    if any(axis is not None for axis in known.axes[1:]):
        raise Mixes("it normalizes over the tokens")
    if step.arguments.get("running_mean") is not None and step["use_input_stats"] and known.has_tokens:
        raise Mixes("it keeps statistics of the tokens of the batch")
    step.require_no_tokens(*_OF_CHANNELS)
    return known


_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var")


# Products


@rule("linear.default")
def _linear(step: Step) -> Value:
    known = step.value("input")
    step.require_no_tokens("weight", "bias")
    if known.axes[-1] is not None:
        raise Mixes("it multiplies along the tokens")
    axes = known.axes[:-1]
    return Value((*axes, None) if step.raw(step["weight"]).axes[1:] else axes)


@rule("matmul.default mm.default bmm.default")
def _matmul(step: Step) -> Value:
    left, right = (step.plain(argument) for argument in step.node.args[:2])
    return _product(left.axes, right.axes)


def _product(left: tuple[Axis | None, ...], right: tuple[Axis | None, ...]) -> Value:
    """Axes of a matrix product; a vector has no dimension to give."""
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    contracted = (left[-1], right[-2] if len(right) > 1 else right[-1])
    if any(axis is not None for axis in contracted):
        raise Mixes("it sums over the tokens")
    if any(rows) and any(columns):
        raise Mixes("it relates every token to every other, and is not an attention that can be rewritten")
    lead = broadcast([Value(left[:-2]), Value(right[:-2])])
    return Value((*lead, *rows, *columns))


@rule("addmm.default baddbmm.default")
def _addmm(step: Step) -> Value:
    added, left, right = (step.plain(argument) for argument in step.node.args[:3])
    return Value(broadcast([added, _product(left.axes, right.axes)]))


@rule("einsum.default")
def _einsum(step: Step) -> Value:
    found = einsum_letters(step.node)
    if found is None:
        raise Mixes("an einsum without an explicit output, or with an ellipsis, is not known")
    inputs, output = found
    letters: dict[str, list[Axis | None]] = {}
    for names, operand in zip(inputs, step["tensors"], strict=True):
        for letter, axis in zip(names, step.plain(operand).axes, strict=True):
            letters.setdefault(letter, []).append(axis)
    axes = {letter: unify(found) for letter, found in letters.items()}
    if any(axis is not None for letter, axis in axes.items() if letter not in output):
        raise Mixes("it sums over the tokens")
    return Value(tuple(axes[letter] for letter in output))


@rule("outer ger")
def _outer(step: Step) -> Value:
    left, right = (step.plain(argument) for argument in step.node.args[:2])
    return Value((*left.axes, *right.axes))


@rule("mv dot")
def _times_vector(step: Step) -> Value:
    left, right = (step.plain(argument) for argument in step.node.args[:2])
    if left.axes[-1] is not None or right.axes[0] is not None:
        raise Mixes("it sums over the tokens")
    return Value(left.axes[:-1])


@rule("prelu")
def _prelu(step: Step) -> Value:
    step.require_no_tokens("weight")
    return step.value("self")


@rule("cosine_similarity")
def _cosine_similarity(step: Step) -> Value:
    axes = broadcast([step.value("x1"), step.value("x2")])
    place = step.dim(step["dim"], len(axes))
    if axes[place] is not None:
        raise Mixes("it reduces along the tokens")
    return Value(axes[:place] + axes[place + 1 :])


@rule("bucketize.Tensor")
def _bucketize(step: Step) -> Value:
    step.require_no_tokens("boundaries")
    return step.value("self")


@rule("conv1d conv2d conv3d")
def _convolution(step: Step) -> Value:
    known, window = step.value("input"), shape_of(step["weight"])[2:]
    step.require_no_tokens("weight", "bias")
    # Without a batch, too, the channels come before what the kernel moves along.
    channels, along_window = known.axes[-1 - len(window)], known.axes[-len(window) :]
    if channels is not None or any(
        axis is not None and size != 1 for axis, size in zip(along_window, window, strict=True)
    ):
        raise Mixes("it mixes neighbouring tokens")
    # A kernel of one token is not padded by "same".
    is_padded = not isinstance(step["padding"], str) and any(step["padding"])
    if is_padded and any(axis is not None for axis in along_window):
        raise Mixes("it shifts or extends the tokens")
    return known


@rule("embedding.default")
def _embedding(step: Step) -> Value:
    step.require_no_tokens("weight")
    if step["scale_grad_by_freq"]:
        raise Mixes("it divides gradients by how often a token occurs in the batch")
    return Value((*step.value("indices").axes, None))


@rule("one_hot.default")
def _one_hot(step: Step) -> Value:
    return Value((*step.value("self").axes, None))


# Attention


def _tree_attention(step: Step) -> Value:
    """Tokens of queries, keys and values must be in the order of the row."""
    query, key, value = (step.plain(argument) for argument in step.node.args[:3])
    for operand in (query, key, value):
        if operand.axes[2:] != (TOKENS, None):
            raise Mixes("the keys of its attention are not one for every token of the row")
    sinks = step.node.kwargs.get("sinks")
    if sinks is not None and step.raw(sinks).has_tokens:
        raise Mixes("the sinks of its attention depend on the tokens")
    return Value((None, None, TOKENS, None))


RULES[tree_attention] = _tree_attention
