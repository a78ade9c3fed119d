"""Rules of the token-axis proof: for every operation, when it works token by token, and what comes out.

A rule takes a `Step` (a node with what is known of its inputs) and returns what is known of its result, or raises
`Mixes` with the reason. Rules are data: one entry of `RULES` per operator. Add your own with `register_token_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.axes import (
    BLANK,
    TOKENS,
    Axis,
    Chosen,
    Counts,
    Keys,
    Mixes,
    Offsets,
    RowNumber,
    Slot,
    Value,
    broadcast,
    unify,
)
from tree_compile.passes.shapes import is_size, is_tensor, shape_of, size_expression, token_factor

aten = torch.ops.aten
Result = Value | tuple[Value, ...]
USES_LENGTH = "it uses the number of tokens as a value, which is not that of any one sequence"


@dataclass(frozen=True)
class Step:
    """One node of the proof.

    Attributes:
        node: the node.
        known: what is known of every tensor before it.
        symbol: T.
        arguments: the node's arguments by the names of its operator's schema, defaults filled in.
    """

    node: fx.Node
    known: Mapping[fx.Node, Result]
    symbol: sympy.Symbol
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def value(self, name: str) -> Value:
        """What is known of the tensor argument `name`, whose numbers must not be row numbers or counts."""
        return self.plain(self.arguments[name])

    def raw(self, argument: Any) -> Value:
        """What is known of an argument; a number is a tensor without dimensions."""
        if not isinstance(argument, fx.Node):
            return Value(())
        if is_size(argument):
            raise Mixes(USES_LENGTH)
        known = self.known[argument]
        assert isinstance(known, Value)
        return known

    def plain(self, argument: Any) -> Value:
        """As `raw`, and refuses numbers that depend on the layout of the row."""
        known = self.raw(argument)
        if known.content is not None and not isinstance(known.content, Keys):
            raise Mixes("it computes with numbers of rows, which depend on what else is in the row")
        return known.without_content()

    def inputs(self) -> list[Any]:
        """All tensor-valued arguments, in order."""
        return [node for node in self.node.all_input_nodes if is_tensor(node)]

    def factor(self, size: Any) -> int:
        """f for a size f * T, 0 for a size without T."""
        factor = token_factor(size, self.symbol)
        if factor < 0:
            raise Mixes(f"it makes a dimension of size {size_expression(size)}, where T is the number of tokens")
        return factor

    def out_factors(self) -> list[int]:
        """Factors of the result's sizes."""
        return [self.factor(size) for size in shape_of(self.node)]

    def dim(self, dim: Any, rank: int) -> int:
        """A dimension counted from the front."""
        return int(dim) % max(rank, 1)


Rule = Callable[[Step], Result]
RULES: dict[Any, Rule] = {}


def register_token_rule(operator: Any, rule: Rule) -> None:
    """Adds or replaces the rule of an operator (an `OpOverload`, or a function that graphs call).

    Args:
        operator: such as `torch.ops.mylib.scale.default`.
        rule: takes a `Step`, returns the `Value` of the result, or raises `Mixes`. `elementwise` is one.
    """
    RULES[operator] = rule


def _operators(names: str) -> list[Any]:
    """Overloads such as `add.Tensor`; a name without overload stands for all overloads.

    Raises:
        ValueError: torch has no such operator.
    """
    found: list[Any] = []
    for name in names.split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(aten, packet_name, None)
        overloads = packet.overloads() if packet is not None else []
        if overload not in ("", *overloads) or not overloads:
            raise ValueError(f"torch has no operator aten::{name}")
        found += [getattr(packet, o) for o in ([overload] if overload else overloads)]
    return found


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for operator in _operators(names):
            RULES[operator] = rule
        return rule

    return register


def rule_of(operator: Any) -> Rule | None:
    """The rule of an operator; those that torch tags as pointwise need no entry."""
    if operator in RULES:
        return RULES[operator]
    name = getattr(operator, "name", lambda: "")()
    if name in RULES_OF_OTHERS:
        return RULES_OF_OTHERS[name]
    tags = getattr(operator, "tags", ())
    # Random numbers belong to a place in the row, also where an operator works element by element.
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return elementwise if is_pointwise else None


# Element by element


def elementwise(step: Step) -> Value:
    """Every number of the result comes from the numbers at the same place."""
    return Value(broadcast(step.plain(argument) for argument in _leaves(step.node.args, step.node.kwargs)))


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for argument in (*args, *kwargs.values()):
        found += _leaves(argument, {}) if isinstance(argument, (list, tuple)) else [argument]
    return [argument for argument in found if isinstance(argument, fx.Node)]


for _operator in _operators(
    "dropout fill zero masked_fill where.ScalarOther where.ScalarSelf where.Scalar copy polar rsub "
    "__and__ __or__ multiply divide.Tensor divide.Scalar subtract true_divide absolute negative greater greater_equal "
    "less less_equal not_equal isclose isreal hardswish log_sigmoid special_xlogy special_expm1 special_log1p "
    "special_exp2 arccos arctan arctan2 ldexp fix"
):
    RULES[_operator] = elementwise


@_rule("to _to_copy clone contiguous alias detach lift_fresh_copy")
def _same(step: Step) -> Value:
    known = step.raw(step["self"])
    if known.content is not None and step.node.meta["val"].dtype not in _HOLDS_ROW_NUMBERS:
        return step.value("self")
    return known


_HOLDS_ROW_NUMBERS = {torch.int32, torch.int64, torch.float32, torch.float64}


@_rule("floor_divide div.Tensor_mode div.Scalar_mode")
def _floor_divide(step: Step) -> Value:
    """The row number of an entry, divided by the entries per token, is the number of its token."""
    known = step.raw(step["self"])
    content = known.content
    if not isinstance(content, RowNumber):
        return elementwise(step)
    if step.arguments.get("rounding_mode", "floor") == "floor" and content.axis.right == step["other"]:
        return Value(known.axes, RowNumber(Axis(content.axis.left, 1)))
    raise Mixes("it divides row numbers by something else than the number of entries per token")


@_rule("remainder.Scalar fmod.Scalar")
def _remainder(step: Step) -> Value:
    known = step.raw(step["self"])
    if isinstance(known.content, RowNumber) and known.content.axis.right == step["other"]:
        return known.without_content()
    return elementwise(step)


# New tensors


@_rule(
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "scalar_tensor empty_strided"
)
def _new(step: Step) -> Value:
    for name in ("fill_value", "s"):
        if is_size(step.arguments.get(name)):
            raise Mixes(USES_LENGTH)
    return Value(tuple(BLANK if factor else None for factor in step.out_factors()))


@_rule("arange.default")
def _arange(step: Step) -> Value:
    (factor,) = step.out_factors()
    if factor == 0:
        return Value((None,))
    return Value((TOKENS if factor == 1 else BLANK,), RowNumber(TOKENS if factor == 1 else BLANK))


# Along some dimensions


def _dims_along(step: Step, dims: Any, rank: int) -> set[int]:
    if dims is None or dims == []:
        return set(range(rank))
    return set(_list_of_dims(step, dims, rank))


def _along(what: str) -> Rule:
    def rule(step: Step) -> Result:
        known = step.value("self")
        dims = _dims_along(step, step.arguments.get("dim"), len(known.axes))
        if any(known.axes[dim] is not None for dim in dims):
            raise Mixes(f"it {what} along the tokens")
        kept = step.arguments.get("keepdim", False)
        removed = set() if kept or not _reduces(step) else dims
        axes = tuple(axis for dim, axis in enumerate(known.axes) if dim not in removed)
        result = Value(axes)
        results = step.node.meta["val"]
        return (result,) * len(results) if isinstance(results, (tuple, list)) else result

    return rule


def _reduces(step: Step) -> bool:
    value = step.node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return len(first.shape) < len(shape_of(step["self"]))


for _operator in _operators(
    "sum mean amax amin max min prod any all argmax argmin logsumexp norm linalg_vector_norm std var std_mean "
    "var_mean median mode kthvalue count_nonzero nansum nanmean"
):
    if torch.Tag.pointwise not in _operator.tags:
        RULES[_operator] = _along("reduces")
for _operator in _operators("linalg_norm aminmax quantile.scalar"):
    RULES[_operator] = _along("reduces")
for _operator in _operators("glu"):
    RULES[_operator] = _along("halves")
for _operator in _operators("softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax"):
    RULES[_operator] = _along("takes a softmax")
for _operator in _operators("cumprod cummax cummin logcumsumexp"):
    RULES[_operator] = _along("accumulates")
for _operator in _operators("diff"):
    RULES[_operator] = _along("subtracts neighbours")
for _operator in _operators("topk"):
    RULES[_operator] = _along("selects")


@_rule("flip.default")
def _flip(step: Step) -> Value:
    return _moved(step, step["dims"], "reverses the order along the tokens")


@_rule("roll.default")
def _roll(step: Step) -> Value:
    return _moved(step, step["dims"] or None, "shifts along the tokens")


def _moved(step: Step, dims: Any, why: str) -> Value:
    known = step.value("self")
    if any(known.axes[dim] is not None for dim in _dims_along(step, dims, len(known.axes))):
        raise Mixes(f"it {why}")
    return known


@_rule("layer_norm rms_norm _fused_rms_norm native_layer_norm")
def _layer_norm(step: Step) -> Value:
    known = step.value("input")
    if any(axis is not None for axis in known.axes[-len(step["normalized_shape"]) :]):
        raise Mixes("it normalizes over the tokens")
    _require_no_tokens(step, "weight", "bias")
    return known


@_rule("batch_norm")
def _batch_norm(step: Step) -> Value:
    known = step.value("input")
    if step["training"] or known.axes[1] is not None:
        raise Mixes("it normalizes over the tokens of the batch")
    return known


@_rule("group_norm instance_norm")
def _group_norm(step: Step) -> Value:
    known = step.value("input")
    if any(axis is not None for axis in known.axes[1:]):
        raise Mixes("it normalizes over the tokens")
    if step.arguments.get("running_mean") is not None and step["use_input_stats"] and known.has_tokens:
        raise Mixes("it keeps statistics of the tokens of the batch")
    return known


def _require_no_tokens(step: Step, *names: str) -> None:
    for name in names:
        if step.raw(step.arguments.get(name)).has_tokens:
            raise Mixes(f"its {name} depends on the tokens")


# Moving dimensions


@_rule("transpose.int swapaxes swapdims.default")
def _transpose(step: Step) -> Value:
    known = step.raw(step["self"])
    first, second = (step.dim(dim, len(known.axes)) for dim in step.node.args[1:3])
    axes = list(known.axes)
    axes[first], axes[second] = axes[second], axes[first]
    return Value(tuple(axes), known.content)


@_rule("t numpy_T mT matrix_H")
def _reverse_two(step: Step) -> Value:
    known = step.raw(step["self"])
    return Value((*known.axes[:-2], *known.axes[-2:][::-1]), known.content)


@_rule("permute.default")
def _permute(step: Step) -> Value:
    known = step.raw(step["self"])
    return Value(tuple(known.axes[step.dim(dim, len(known.axes))] for dim in step["dims"]), known.content)


@_rule("movedim.intlist movedim.int moveaxis.intlist moveaxis.int")
def _movedim(step: Step) -> Value:
    known = step.raw(step["self"])
    rank = len(known.axes)
    source, destination = (_list_of_dims(step, step[name], rank) for name in ("source", "destination"))
    moved = dict(zip(destination, source, strict=True))
    rest = iter(place for place in range(rank) if place not in source)
    order = [moved[place] if place in moved else next(rest) for place in range(rank)]
    return Value(tuple(known.axes[place] for place in order), known.content)


def _list_of_dims(step: Step, dims: Any, rank: int) -> list[int]:
    return [step.dim(dim, rank) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


@_rule("unsqueeze.default")
def _unsqueeze(step: Step) -> Value:
    known = step.raw(step["self"])
    axes = list(known.axes)
    axes.insert(step.dim(step["dim"], len(axes) + 1), None)
    return Value(tuple(axes), known.content)


@_rule("squeeze")
def _squeeze(step: Step) -> Value:
    known, shape = step.raw(step["self"]), shape_of(step["self"])
    chosen = _dims_along(step, step.arguments.get("dim"), len(shape))
    kept = [dim for dim, size in enumerate(shape) if dim not in chosen or size_expression(size) != 1]
    return Value(tuple(known.axes[dim] for dim in kept), known.content)


@_rule(
    "view.default reshape.default _unsafe_view.default _reshape_copy.default flatten.using_ints unflatten.int "
    "view_copy.default view_as reshape_as"
)
def _view(step: Step) -> Value:
    """Sizes are taken apart into factors, in order, and put together again; T must stay whole."""
    known = step.raw(step["self"])
    if any(axis is not None and isinstance(axis.order, Chosen) for axis in known.axes):
        return _view_of_chosen(step, known)
    factors = step.out_factors()
    source = shape_of(step["self"])
    sizes = [int(size) for size, axis in zip(source, known.axes, strict=True) if axis is None]
    if all(axis is None or axis == BLANK for axis in known.axes) and math.prod(sizes) == 1:
        return Value(tuple(BLANK if factor else None for factor in factors), known.content)
    atoms = _Atoms.of(step, step["self"], known)
    axes = tuple(atoms.take(size, factor) for size, factor in zip(shape_of(step.node), factors, strict=True))
    content = known.content
    if isinstance(content, RowNumber) and axes != known.axes and len([axis for axis in axes if axis]) != 1:
        raise Mixes("it reshapes row numbers")
    return Value(axes, content)


def _view_of_chosen(step: Step, known: Value) -> Value:
    """What a mask chose keeps its entries as the first dimension."""
    before, after = shape_of(step["self"])[0], shape_of(step.node)[0]
    if size_expression(before) != size_expression(after) or any(axis is not None for axis in known.axes[1:]):
        raise Mixes(_SPLIT)
    return Value((known.axes[0], *(None for _ in shape_of(step.node)[1:])), known.content)


@dataclass
class _Atoms:
    """Sizes of a tensor in order: whole numbers, and axes that cannot be split."""

    atoms: list[int | Axis]

    @classmethod
    def of(cls, step: Step, node: Any, known: Value) -> _Atoms:
        atoms: list[int | Axis] = []
        for size, axis in zip(shape_of(node), known.axes, strict=True):
            if axis is None:
                atoms.append(int(size))
            elif axis == BLANK:
                # All its entries are the same, so each may count as that of its place.
                atoms += [TOKENS, step.factor(size)]
            elif axis.order is not None:
                atoms.append(axis)
            else:
                atoms += [axis.left, TOKENS, axis.right]
        return cls([atom for atom in atoms if atom != 1])

    def take(self, size: Any, factor: int) -> Axis | None:
        """The axis of the next dimension of the result."""
        if factor == 0:
            self._numbers(int(size))
            return None
        left = self._numbers_before_tokens()
        if not self.atoms or not isinstance(self.atoms[0], Axis):
            raise Mixes(_SPLIT)
        axis = self.atoms.pop(0)
        assert isinstance(axis, Axis)
        if axis.order is not None:
            if left != 1 or axis.left * axis.right != factor:
                raise Mixes("it reshapes rows while they are sorted")
            return axis
        if factor % left:
            raise Mixes(_SPLIT)
        self._numbers(factor // left)
        return Axis(left, factor // left)

    def _numbers_before_tokens(self) -> int:
        left = 1
        while self.atoms and isinstance(self.atoms[0], int):
            left *= self.atoms.pop(0)  # type: ignore[operator]
        return left

    def _numbers(self, wanted: int) -> None:
        """Takes numbers from the front whose product is `wanted`."""
        while wanted > 1:
            if not self.atoms or isinstance(self.atoms[0], Axis):
                raise Mixes(_SPLIT)
            first = self.atoms[0]
            shared = math.gcd(first, wanted)
            if shared not in (first, wanted):
                raise Mixes(_SPLIT)
            wanted //= shared
            self.atoms[0] = first // shared
            if self.atoms[0] == 1:
                self.atoms.pop(0)


_SPLIT = "it reshapes the tensor so that tokens and features are mixed in one dimension"


@_rule("view_as_complex.default")
def _view_as_complex(step: Step) -> Value:
    return Value(step.value("self").axes[:-1])


@_rule("view_as_real.default")
def _view_as_real(step: Step) -> Value:
    return Value((*step.value("self").axes, None))


@_rule("expand.default broadcast_to.default expand_as.default")
def _expand(step: Step) -> Value:
    known = step.raw(step["self"])
    factors = step.out_factors()
    padded = (None,) * (len(factors) - len(known.axes)) + known.axes
    return Value(tuple(axis or (BLANK if f else None) for axis, f in zip(padded, factors, strict=True)), known.content)


@_rule("repeat.default tile.default")
def _repeat(step: Step) -> Value:
    known = step.value("self")
    times = list(step.node.args[1])  # type: ignore[arg-type]
    padded = (None,) * (len(times) - len(known.axes)) + known.axes
    sizes = (1,) * (len(times) - len(known.axes)) + shape_of(step["self"])
    return Value(tuple(_tiled(*each) for each in zip(padded, sizes, times, strict=True)))


def _tiled(axis: Axis | None, size: Any, count: Any) -> Axis | None:
    if is_size(count):
        if axis is not None or size != 1:
            raise Mixes("it repeats something as often as there are tokens")
        return BLANK
    if axis is None or axis == BLANK or count == 1:
        return axis
    if axis.order is not None:
        raise Mixes("it repeats rows while they are sorted")
    return Axis(axis.left * count, axis.right)


@_rule("repeat_interleave.self_int")
def _repeat_interleave(step: Step) -> Value:
    known, dim = step.value("self"), step["dim"]
    if dim is None:
        raise Mixes("it flattens tokens and features into one dimension")
    axes = list(known.axes)
    axis = axes[step.dim(dim, len(axes))]
    if axis is not None and axis != BLANK:
        if axis.order is not None:
            raise Mixes("it repeats rows while they are sorted")
        axes[step.dim(dim, len(axes))] = Axis(axis.left, axis.right * int(step["repeats"]))
    return Value(tuple(axes))


# Taking parts


@_rule("slice.Tensor narrow.default")
def _slice(step: Step) -> Value:
    known = step.raw(step["self"])
    place = step.dim(step["dim"], len(known.axes))
    before, after = shape_of(step["self"])[place], shape_of(step.node)[place]
    if known.axes[place] is not None and size_expression(before) != size_expression(after):
        raise Mixes("it cuts or shifts the tokens")
    if known.axes[place] is None and step.factor(after):
        raise Mixes("it takes as many parts of a tensor without tokens as there are tokens")
    if known.axes[place] is None and any(is_size(argument) for argument in step.node.args):
        raise Mixes(USES_LENGTH)
    return known


@_rule("select.int")
def _select(step: Step) -> Value:
    known = step.raw(step["self"])
    place = step.dim(step["dim"], len(known.axes))
    if known.axes[place] is not None:
        raise Mixes("it takes one token out of all")
    return Value(known.axes[:place] + known.axes[place + 1 :], known.content)


@_rule("split.Tensor split_with_sizes chunk unsafe_split unsafe_chunk tensor_split split.sizes")
def _split(step: Step) -> Result:
    known = step.value("self")
    if known.axes[step.dim(step["dim"], len(known.axes))] is not None:
        raise Mixes("it splits the tokens")
    return (known,) * len(step.node.meta["val"])


@_rule("unbind.int")
def _unbind(step: Step) -> Result:
    known = step.value("self")
    place = step.dim(step["dim"], len(known.axes))
    if known.axes[place] is not None:
        raise Mixes("it splits the tokens")
    return (Value(known.axes[:place] + known.axes[place + 1 :]),) * len(step.node.meta["val"])


@_rule("cat.default concat.default")
def _cat(step: Step) -> Value:
    values = [step.plain(part) for part in step["tensors"]]
    values = [value for value, part in zip(values, step["tensors"], strict=True) if shape_of(part) != (0,)]
    place = step.dim(step["dim"], len(values[0].axes))
    if any(value.axes[place] is not None for value in values):
        raise Mixes("it joins something to the tokens")
    return Value(broadcast(values))


@_rule("stack.default")
def _stack(step: Step) -> Value:
    axes = list(broadcast(step.plain(part) for part in step["tensors"]))
    axes.insert(step.dim(step["dim"], len(axes) + 1), None)
    return Value(tuple(axes))


@_rule("constant_pad_nd.default pad.default")
def _pad(step: Step) -> Value:
    known, pad = step.value("self"), step["pad"]
    for place in range(len(pad) // 2):
        if known.axes[-1 - place] is not None and (pad[2 * place] != 0 or pad[2 * place + 1] != 0):
            raise Mixes("it shifts or extends the tokens")
    return known


@_rule("slice_scatter.default select_scatter.default")
def _slice_scatter(step: Step) -> Value:
    whole, part = step.value("self"), step.value("src")
    place = step.dim(step["dim"], len(whole.axes))
    part_axes = part.axes if "start" in step.arguments else (*part.axes[:place], None, *part.axes[place:])
    sizes = [size_expression(shape_of(step[name])[place]) for name in ("src", "self") if "start" in step.arguments]
    if whole.axes[place] is not None and (not sizes or sizes[0] != sizes[1]):
        raise Mixes("it writes some of the tokens only")
    if whole.axes[place] is None and any(is_size(argument) for argument in step.node.args):
        raise Mixes(USES_LENGTH)
    return Value(broadcast([whole, Value(part_axes)]))


@_rule("triu.default tril.default")
def _triangle(step: Step) -> Value:
    known = step.value("self")
    if any(axis is not None for axis in known.axes[-2:]):
        raise Mixes("it treats tokens by their place in the row")
    return known


# Products


@_rule("linear.default")
def _linear(step: Step) -> Value:
    known = step.value("input")
    _require_no_tokens(step, "weight", "bias")
    if known.axes[-1] is not None:
        raise Mixes("it multiplies along the tokens")
    axes = known.axes[:-1]
    return Value((*axes, None) if step.raw(step["weight"]).axes[1:] else axes)


@_rule("matmul.default mm.default bmm.default")
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


@_rule("addmm.default baddbmm.default addbmm.default")
def _addmm(step: Step) -> Value:
    added, left, right = (step.plain(argument) for argument in step.node.args[:3])
    return Value(broadcast([added, _product(left.axes, right.axes)]))


@_rule("einsum.default")
def _einsum(step: Step) -> Value:
    inputs, _, output = str(step["equation"]).replace(" ", "").partition("->")
    if not output or "." in inputs:
        raise Mixes("an einsum without an explicit output, or with an ellipsis, is not known")
    letters: dict[str, list[Axis | None]] = {}
    for names, operand in zip(inputs.split(","), step["tensors"], strict=True):
        for letter, axis in zip(names, step.plain(operand).axes, strict=True):
            letters.setdefault(letter, []).append(axis)
    axes = {letter: unify(found) for letter, found in letters.items()}
    if any(axis is not None for letter, axis in axes.items() if letter not in output):
        raise Mixes("it sums over the tokens")
    return Value(tuple(axes[letter] for letter in output))


@_rule("outer ger")
def _outer(step: Step) -> Value:
    left, right = (step.plain(argument) for argument in step.node.args[:2])
    return Value((*left.axes, *right.axes))


@_rule("mv dot")
def _times_vector(step: Step) -> Value:
    left, right = (step.plain(argument) for argument in step.node.args[:2])
    if left.axes[-1] is not None or right.axes[0] is not None:
        raise Mixes("it sums over the tokens")
    return Value(left.axes[:-1])


@_rule("prelu")
def _prelu(step: Step) -> Value:
    _require_no_tokens(step, "weight")
    return step.value("self")


@_rule("cosine_similarity")
def _cosine_similarity(step: Step) -> Value:
    axes = broadcast([step.value("x1"), step.value("x2")])
    place = step.dim(step["dim"], len(axes))
    if axes[place] is not None:
        raise Mixes("it reduces along the tokens")
    return Value(axes[:place] + axes[place + 1 :])


@_rule("bucketize.Tensor")
def _bucketize(step: Step) -> Value:
    _require_no_tokens(step, "boundaries")
    return step.value("self")


@_rule("conv1d.default conv2d.default conv3d.default")
def _convolution(step: Step) -> Value:
    known = step.value("input")
    _require_no_tokens(step, "weight", "bias")
    if known.axes[1] is not None or any(
        axis is not None and size != 1 for axis, size in zip(known.axes[2:], shape_of(step["weight"])[2:], strict=True)
    ):
        raise Mixes("it mixes neighbouring tokens")
    if any(axis is not None for axis in known.axes[2:]) and any(number != 0 for number in step["padding"]):
        raise Mixes("it shifts or extends the tokens")
    return known


@_rule("embedding.default")
def _embedding(step: Step) -> Value:
    _require_no_tokens(step, "weight")
    if step["scale_grad_by_freq"]:
        raise Mixes("it divides gradients by how often a token occurs in the batch")
    return Value((*step.value("indices").axes, None))


@_rule("one_hot.default")
def _one_hot(step: Step) -> Value:
    return Value((*step.value("self").axes, None))


# Rows by number: dispatch to experts and back

_BY_NUMBERS = "rows by numbers that may belong to other tokens"


@_rule("sort.default sort.stable argsort")
def _sort(step: Step) -> Result:
    raw = step.raw(step["self"])
    axis = raw.axes[step.dim(step["dim"], len(raw.axes))] if raw.axes else None
    if axis is None:
        return (step.value("self"),) * 2 if _is_pair(step) else step.value("self")
    if isinstance(raw.content, RowNumber) and isinstance(axis.order, fx.Node) and not step["descending"]:
        return _inverse_of(step, axis)
    known = step.value("self")
    if len(known.axes) != 1 or axis.order is not None:
        raise Mixes("it sorts the tokens")
    sorted_axis = Axis(axis.left, axis.right, step.node)
    numbers = Value((sorted_axis,), RowNumber(axis))
    return (Value((sorted_axis,), Keys(step.node)), numbers) if _is_pair(step) else numbers


def _inverse_of(step: Step, axis: Axis) -> Result:
    """Sorting the row numbers of sorted entries puts them back: where each is found is its slot."""
    natural = Axis(axis.left, axis.right)
    assert isinstance(axis.order, fx.Node)
    slots = Value((natural,), Slot(axis.order))
    return (Value((natural,), RowNumber(natural)), slots) if _is_pair(step) else slots


def _is_pair(step: Step) -> bool:
    return isinstance(step.node.meta["val"], (tuple, list))


@_rule("histc.default")
def _histc(step: Step) -> Value:
    content = step.raw(step["self"]).content
    if isinstance(content, Keys) and step["min"] == 0 and step["max"] == step["bins"] - 1:
        return Value((None,), Counts(content.order))
    return _counted(step)


@_rule("bincount.default")
def _bincount(step: Step) -> Value:
    content = step.raw(step["self"]).content
    if isinstance(content, Keys) and step["weights"] is None:
        return Value((None,), Counts(content.order))
    return _counted(step)


def _counted(step: Step) -> Value:
    known = step.value("self")
    if known.has_tokens:
        raise Mixes("it counts over the tokens")
    return Value((None,))


@_rule("cumsum.default")
def _cumsum(step: Step) -> Result:
    known = step.raw(step["self"])
    if isinstance(known.content, Counts) and len(known.axes) == 1:
        return Value((None,), Offsets(known.content.order))
    return _CUMSUM(step)


_CUMSUM = _along("accumulates")


@_rule("_grouped_mm.default")
def grouped_product(step: Step) -> Value:
    """Rows sorted by expert, times the weight of their expert: the groups must end where the sort says."""
    left, offsets = step.plain(step.node.args[0]), step.raw(step["offs"])
    _require_no_tokens(step, "mat2", "weight", "bias")
    order = left.axes[0].order if left.axes[0] is not None else None
    if not isinstance(order, fx.Node) or offsets.content != Offsets(order):
        raise Mixes("its groups of rows are not those of the sort that put the rows in order")
    return Value((left.axes[0], None))


@_rule("index.Tensor")
def _index(step: Step) -> Value:
    known = step.raw(step["self"])
    if len(step["indices"]) == 1 and step["indices"][0].meta["val"].dtype == torch.bool:
        return _chosen_entries(known, step["indices"][0], step.plain(step["indices"][0]))
    indices = list(step["indices"]) + [None] * (len(known.axes) - len(step["indices"]))
    used = [place for place, index in enumerate(indices) if index is not None]
    picked = broadcast(_taken(step, known, place, indices[place]) for place in used)
    rest = [axis for place, axis in enumerate(known.axes) if place not in used]
    adjacent = used == list(range(used[0], used[-1] + 1))
    front = used[0] if adjacent else 0
    content = known.content if len(known.axes) == 1 else None
    if known.content is not None and content is None:
        raise Mixes("it takes parts of row numbers")
    return Value((*rest[:front], *picked, *rest[front:]), content)


def _chosen_entries(known: Value, mask: Any, chosen: Value) -> Value:
    """The entries that a mask of the leading dimensions chooses."""
    count = len(chosen.axes)
    _chosen_place([unify(pair) for pair in zip(known.axes[:count], chosen.axes, strict=True)], chosen)
    if known.content is not None and len(known.axes) > 1:
        raise Mixes("it takes parts of row numbers")
    return Value((Axis(1, 1, Chosen(mask)), *known.axes[count:]), known.content)


def _chosen_place(axes: Sequence[Axis | None], chosen: Value) -> int:
    """The one dimension of a mask that goes along the tokens, all of them in order."""
    places = [place for place, axis in enumerate(axes) if axis is not None]
    if len(places) != 1 or axes[places[0]] == BLANK or axes[places[0]].order or chosen.axes[places[0]] is None:  # type: ignore[union-attr]
        raise Mixes("it selects rows by a mask that is not one of all tokens")
    return places[0]


@_rule("where.default nonzero_numpy")
def _where_is(step: Step) -> Result:
    """Where a mask is true: at every chosen entry, the number of its row, and its place within the row."""
    mask = step.node.args[0]
    chosen = step.plain(mask)
    place = _chosen_place(chosen.axes, chosen)
    entries = Value((Axis(1, 1, Chosen(mask)),))  # type: ignore[arg-type]
    numbers = Value(entries.axes, RowNumber(chosen.axes[place]))  # type: ignore[arg-type]
    return tuple(numbers if dim == place else entries for dim in range(len(chosen.axes)))


@_rule("nonzero.default")
def _nonzero(step: Step) -> Value:
    mask = step["self"]
    chosen = step.plain(mask)
    _chosen_place(chosen.axes, chosen)
    if len(chosen.axes) != 1:
        raise Mixes("it puts numbers of rows and places within a row into one tensor")
    return Value((Axis(1, 1, Chosen(mask)), None), RowNumber(chosen.axes[0]))  # type: ignore[arg-type]


def _taken(step: Step, known: Value, place: int, index: Any) -> Value:
    """Axes of an index tensor, once it is clear that it takes, at every entry, that entry's own row."""
    axis, chosen = known.axes[place], step.raw(index)
    if index.meta["val"].dtype == torch.bool:
        raise Mixes("it selects rows by a mask")
    if axis is None:
        return step.plain(index)
    if isinstance(chosen.content, RowNumber) and axis.order is None and _same_rows(chosen.content.axis, axis):
        return chosen.without_content()
    if isinstance(chosen.content, Slot) and axis.order is chosen.content.order:
        return chosen.without_content()
    raise Mixes(f"it takes {_BY_NUMBERS}")


def _same_rows(numbers: Axis, axis: Axis | None) -> bool:
    return axis is not None and axis != BLANK and (numbers.left, numbers.right) == (axis.left, axis.right)


@_rule("index_select.default")
def _index_select(step: Step) -> Value:
    known = step.raw(step["self"])
    place = step.dim(step["dim"], len(known.axes))
    picked = _taken(step, known, place, step["index"]).axes
    content = known.content if len(known.axes) == 1 else None
    return Value((*known.axes[:place], *picked, *known.axes[place + 1 :]), content)


@_rule("index_put.default")
def _index_put(step: Step) -> Value:
    whole, indices, values = step.raw(step["self"]), step["indices"], step["values"]
    if len(indices) == 1 and indices[0].meta["val"].dtype == torch.bool:
        return _put_where(step, indices[0], values)
    if len(indices) == 1 and _is_choice_of_tokens(step.raw(indices[0])):
        return _put_rows(step, indices[0], values)
    if len(whole.axes) == 1 and len(indices) == 1 and not step["accumulate"]:
        return _put_back(step.raw(indices[0]), step.raw(values))
    raise Mixes(f"it writes {_BY_NUMBERS}")


def _put_back(numbers: Value, put: Value) -> Value:
    """Writes sorted rows, or their places, at the numbers that the rows had before the sort."""
    axis, content = numbers.axes[0] if numbers.axes else None, numbers.content
    order = axis.order if axis is not None else None
    if isinstance(order, fx.Node) and isinstance(content, RowNumber) and _same_rows(content.axis, axis):
        if put in (Value((BLANK,), RowNumber(BLANK)), Value((TOKENS,), RowNumber(TOKENS))):
            return Value((content.axis,), Slot(order))
        if put.axes == (axis,) and put.content is None:
            return Value((content.axis,))
    raise Mixes(f"it writes {_BY_NUMBERS}")


def _put_where(step: Step, mask: Any, values: Any) -> Value:
    """Writes at the entries that a mask of the leading dimensions chooses: one value, or what was chosen by it."""
    whole, chosen, value = step.value("self"), step.plain(mask), step.plain(values)
    rest: tuple[Axis | None, ...] = (None,) * (len(whole.axes) - len(chosen.axes))
    if value.axes[:1] == (Axis(1, 1, Chosen(mask)),) and len(value.axes) == 1 + len(rest):
        rest = value.axes[1:]
    elif value.has_tokens or values.meta["val"].numel() != 1:
        raise Mixes(f"it writes {_BY_NUMBERS}")
    return Value(broadcast([whole, Value((*chosen.axes, *rest))]))


def _is_choice_of_tokens(numbers: Value) -> bool:
    """Whether they are numbers of tokens that a mask chose, each once."""
    order = numbers.axes[0].order if len(numbers.axes) == 1 and numbers.axes[0] else None
    return (
        isinstance(order, Chosen)
        and len(shape_of(order.mask)) == 1
        and isinstance(numbers.content, RowNumber)
        and numbers.content.axis == TOKENS
    )


def _put_rows(step: Step, numbers: Any, values: Any) -> Value:
    whole, value = step.value("self"), step.plain(values)
    of_numbers = step.raw(numbers).axes[0]
    if whole.axes[0] not in (BLANK, TOKENS) or value.axes[:1] != (of_numbers,) or len(value.axes) != len(whole.axes):
        raise Mixes(f"it writes {_BY_NUMBERS}")
    return Value((TOKENS, *broadcast([Value(whole.axes[1:]), Value(value.axes[1:])])))


@_rule("index_add.default")
def _index_add(step: Step) -> Value:
    whole, numbers, added = step.value("self"), step.raw(step["index"]), step.value("source")
    place = step.dim(step["dim"], len(whole.axes))
    axis, content = added.axes[place], numbers.content
    into = whole.axes[place]
    same_entries = isinstance(content, RowNumber) and numbers.axes == (axis,)
    if axis is None or not same_entries or into is None or (into != BLANK and not _same_rows(content.axis, into)):  # type: ignore[union-attr]
        raise Mixes(f"it adds {_BY_NUMBERS}")
    rest = broadcast(Value(value.axes[:place] + value.axes[place + 1 :]) for value in (whole, added))
    return Value((*rest[:place], Axis(content.axis.left, content.axis.right), *rest[place:]))  # type: ignore[union-attr]


@_rule("gather.default")
def _gather(step: Step) -> Value:
    return _within_rows(step, "takes", [])


@_rule("scatter scatter_add scatter_reduce")
def _scatter(step: Step) -> Value:
    return _within_rows(step, "writes", [step["src"] if "src" in step.arguments else step["value"]])


def _within_rows(step: Step, what: str, others: list[Any]) -> Value:
    known, numbers = step.value("self"), step.value("index")
    place = step.dim(step["dim"], len(known.axes))
    values = [step.plain(other) for other in others]
    if known.axes[place] is not None or any(axes.axes[place] is not None for axes in (numbers, *values) if axes.axes):
        raise Mixes(f"it {what} {_BY_NUMBERS}")
    if any(not _same_tokens(known, other) for other in (numbers, *values) if other.axes):
        raise Mixes(f"it {what} some of the tokens only")
    return Value(broadcast([known, numbers, *values]))


def _same_tokens(known: Value, other: Value) -> bool:
    """Whether two tensors without broadcasting have their tokens in the same dimensions."""
    return [axis is None for axis in known.axes] == [axis is None for axis in other.axes]


TAKE_SIZES: set[Rule] = {elementwise, _new, _arange, _view, _expand, _repeat, _slice, _slice_scatter}
"""Rules that look at arguments that depend on T themselves; such an argument of any other operation is refused."""

RULES_OF_OTHERS: dict[str, Rule] = {
    "transformers::grouped_mm_fallback": grouped_product,
}
"""Rules of operators that other libraries register, by name, since they need not be installed."""
