"""Rules of operators that make, move, take and join dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tree_compile.passes.axes import BLANK, TOKENS, Axis, Chosen, Mixes, RowNumber, Value, broadcast
from tree_compile.passes.shapes import Extent, is_size, shape_of, size_expression
from tree_compile.passes.token_rules import USES_LENGTH, Result, Step, rule

# New tensors


@rule(
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "scalar_tensor empty_strided",
    takes_sizes=True,
)
def _new(step: Step) -> Value:
    for name in ("fill_value", "s"):
        if is_size(step.arguments.get(name)):
            raise Mixes(USES_LENGTH)
    return Value(tuple(BLANK if factor else None for factor in step.out_factors()))


@rule("arange.default", takes_sizes=True)
def _arange(step: Step) -> Value:
    found = step.extent(shape_of(step.node)[0])
    if found.factor == 0:
        return Value((None,))
    axis = TOKENS if found == Extent(1) else BLANK
    return Value((axis,), RowNumber(axis))


# Moving dimensions


@rule("transpose.int swapaxes swapdims.default")
def _transpose(step: Step) -> Value:
    known = step.raw(step["self"])
    first, second = (step.dim(dim, len(known.axes)) for dim in step.node.args[1:3])
    axes = list(known.axes)
    axes[first], axes[second] = axes[second], axes[first]
    return Value(tuple(axes), known.content)


@rule("t numpy_T mT matrix_H")
def _reverse_two(step: Step) -> Value:
    known = step.raw(step["self"])
    return Value((*known.axes[:-2], *known.axes[-2:][::-1]), known.content)


@rule("permute.default")
def _permute(step: Step) -> Value:
    known = step.raw(step["self"])
    return Value(tuple(known.axes[step.dim(dim, len(known.axes))] for dim in step["dims"]), known.content)


@rule("movedim.intlist movedim.int moveaxis.intlist moveaxis.int")
def _movedim(step: Step) -> Value:
    known = step.raw(step["self"])
    rank = len(known.axes)
    source, destination = (step.dims(step[name], rank) for name in ("source", "destination"))
    moved = dict(zip(destination, source, strict=True))
    rest = iter(place for place in range(rank) if place not in source)
    order = [moved[place] if place in moved else next(rest) for place in range(rank)]
    return Value(tuple(known.axes[place] for place in order), known.content)


@rule("unsqueeze.default")
def _unsqueeze(step: Step) -> Value:
    known = step.raw(step["self"])
    axes = list(known.axes)
    axes.insert(step.dim(step["dim"], len(axes) + 1), None)
    return Value(tuple(axes), known.content)


@rule("squeeze")
def _squeeze(step: Step) -> Value:
    known, shape = step.raw(step["self"]), shape_of(step["self"])
    chosen = step.dims_or_all(step.arguments.get("dim"), len(shape))
    kept = [dim for dim, size in enumerate(shape) if dim not in chosen or size_expression(size) != 1]
    return Value(tuple(known.axes[dim] for dim in kept), known.content)


@rule(
    "view.default reshape.default _unsafe_view.default _reshape_copy.default flatten.using_ints unflatten.int "
    "view_copy.default view_as reshape_as",
    takes_sizes=True,
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
                found = step.extent(size)
                atoms += [Axis(window=found.window, later=bool(found.fewer)), found.factor]
            elif axis.order is not None:
                atoms.append(axis)
            else:
                atoms += [axis.left, replace(axis, left=1, right=1), axis.right]
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
        return replace(axis, left=left, right=factor // left)

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


@rule("view_as_complex.default")
def _view_as_complex(step: Step) -> Value:
    return Value(step.value("self").axes[:-1])


@rule("view_as_real.default")
def _view_as_real(step: Step) -> Value:
    return Value((*step.value("self").axes, None))


@rule("expand.default broadcast_to.default expand_as.default", takes_sizes=True)
def _expand(step: Step) -> Value:
    known = step.raw(step["self"])
    factors = step.out_factors()
    padded = (None,) * (len(factors) - len(known.axes)) + known.axes
    return Value(tuple(axis or (BLANK if f else None) for axis, f in zip(padded, factors, strict=True)), known.content)


@rule("repeat.default tile.default", takes_sizes=True)
def _repeat(step: Step) -> Value:
    known = step.value("self")
    # A tile may give fewer numbers than there are dimensions: those of the last ones.
    given = list(step.node.args[1])  # type: ignore[arg-type]
    times = [1] * (len(known.axes) - len(given)) + given
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
    return replace(axis, left=axis.left * count)


@rule("repeat_interleave.self_int")
def _repeat_interleave(step: Step) -> Value:
    known, dim = step.value("self"), step["dim"]
    if dim is None:
        raise Mixes("it flattens tokens and features into one dimension")
    axes = list(known.axes)
    axis = axes[step.dim(dim, len(axes))]
    if axis is not None and axis != BLANK:
        if axis.order is not None:
            raise Mixes("it repeats rows while they are sorted")
        axes[step.dim(dim, len(axes))] = replace(axis, right=axis.right * int(step["repeats"]))
    return Value(tuple(axes))


# Taking parts


@rule("slice.Tensor narrow.default", takes_sizes=True)
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


@rule("select.int")
def _select(step: Step) -> Value:
    known = step.raw(step["self"])
    place = step.dim(step["dim"], len(known.axes))
    if known.axes[place] is not None:
        raise Mixes("it takes one token out of all")
    return Value(known.axes[:place] + known.axes[place + 1 :], known.content)


@rule("split.Tensor split_with_sizes chunk unsafe_split unsafe_chunk tensor_split split.sizes")
def _split(step: Step) -> Result:
    known = step.value("self")
    if known.axes[step.dim(step["dim"], len(known.axes))] is not None:
        raise Mixes("it splits the tokens")
    step.require_no_tokens("tensor_indices_or_sections")
    return (known,) * len(step.node.meta["val"])


@rule("unbind.int")
def _unbind(step: Step) -> Result:
    known = step.value("self")
    place = step.dim(step["dim"], len(known.axes))
    if known.axes[place] is not None:
        raise Mixes("it splits the tokens")
    return (Value(known.axes[:place] + known.axes[place + 1 :]),) * len(step.node.meta["val"])


@rule("cat.default")
def _cat(step: Step) -> Value:
    values = [step.plain(part) for part in step["tensors"]]
    values = [value for value, part in zip(values, step["tensors"], strict=True) if shape_of(part) != (0,)]
    place = step.dim(step["dim"], len(values[0].axes))
    if any(value.axes[place] is not None for value in values):
        raise Mixes("it joins something to the tokens")
    return Value(broadcast(values))


@rule("stack.default")
def _stack(step: Step) -> Value:
    axes = list(broadcast(step.plain(part) for part in step["tensors"]))
    axes.insert(step.dim(step["dim"], len(axes) + 1), None)
    return Value(tuple(axes))


@rule("constant_pad_nd.default pad.default")
def _pad(step: Step) -> Value:
    known, pad = step.value("self"), step["pad"]
    for place in range(len(pad) // 2):
        if known.axes[-1 - place] is not None and (pad[2 * place] != 0 or pad[2 * place + 1] != 0):
            raise Mixes("it shifts or extends the tokens")
    return known


@rule("slice_scatter.default select_scatter.default", takes_sizes=True)
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


@rule("triu.default tril.default")
def _triangle(step: Step) -> Value:
    known = step.value("self")
    if any(axis is not None for axis in known.axes[-2:]):
        raise Mixes("it treats tokens by their place in the row")
    return known


@rule("flip.default")
def _flip(step: Step) -> Value:
    return _moved(step, step["dims"], "reverses the order along the tokens")


@rule("roll.default")
def _roll(step: Step) -> Value:
    return _moved(step, step["dims"] or None, "shifts along the tokens")


def _moved(step: Step, dims: Any, why: str) -> Value:
    known = step.value("self")
    if any(known.axes[dim] is not None for dim in step.dims_or_all(dims, len(known.axes))):
        raise Mixes(f"it {why}")
    return known
