"""Rules of operators that take and write rows by number: dispatch to experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from tree_compile.passes.axes import (
    BLANK,
    TOKENS,
    Axis,
    Chosen,
    Content,
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
from tree_compile.passes.nodes import arguments, operator_name
from tree_compile.passes.rules_of_products import along
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.token_rules import HOLD_ROW_NUMBERS, RULES_OF_OTHERS, Result, Step, rule

_BY_NUMBERS = "rows by numbers that may belong to other tokens"


@rule("sort.default sort.stable argsort")
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
    sorted_axis = replace(axis, order=step.node)
    numbers = Value((sorted_axis,), RowNumber(axis))
    # Counts by key say where the entries of each key end only if the keys grow.
    keys = Value((sorted_axis,), None if step["descending"] else Keys(step.node))
    return (keys, numbers) if _is_pair(step) else numbers


def _inverse_of(step: Step, axis: Axis) -> Result:
    """Sorting the row numbers of sorted entries puts them back: where each is found is its slot."""
    natural = replace(axis, order=None)
    assert isinstance(axis.order, fx.Node)
    slots = Value((natural,), Slot(axis.order))
    return (Value((natural,), RowNumber(natural)), slots) if _is_pair(step) else slots


def _is_pair(step: Step) -> bool:
    return isinstance(step.node.meta["val"], (tuple, list))


@rule("histc.default", counts=True)
def _histc(step: Step) -> Value:
    keys = step.raw(step["self"])
    if not _are_all_keys(keys) or step["min"] != 0 or step["max"] != step["bins"] - 1:
        return _counted(step)
    if not _is_never_negative(keys.content.order.args[0]):  # type: ignore[union-attr]
        raise Mixes("it leaves out keys below 0, which no step before the sort rules out")
    return Value((None,), Counts(keys.content.order))  # type: ignore[union-attr]


@rule("bincount.default")
def _bincount(step: Step) -> Value:
    step.require_no_tokens("weights")
    return _counted(step)


def _are_all_keys(known: Value) -> bool:
    """Whether it is the sorted values of a sort, each of them once."""
    (axis, *others) = known.axes or (None,)
    return isinstance(known.content, Keys) and not others and axis is not None and axis.order is known.content.order


def _is_never_negative(node: Any) -> bool:
    """Whether numbers are at least 0 by what made them: mostly, they number the experts that a router chose."""
    name, given = operator_name(node), arguments(node)
    if name in _NUMBERINGS or (name == "getitem" and node.args[1] == 1 and operator_name(node.args[0]) in _CHOICES):
        return True
    if name == "clamp" and isinstance(given["min"], (int, float)):
        return bool(given["min"] >= 0)
    if name == "remainder":
        return isinstance(given["other"], (int, float)) and given["other"] > 0
    if node.op == "get_attr":
        value = attrgetter(node.target)(node.graph.owning_module)
        return not isinstance(value, nn.Parameter) and bool((value >= 0).all())
    # A cast to a small dtype makes great numbers negative.
    keeps = name in _MOVES and node.meta["val"].dtype in HOLD_ROW_NUMBERS
    return keeps and _is_never_negative(node.args[0])


_NUMBERINGS = {"argmax", "argmin", "argsort", "one_hot"}
_CHOICES = {"topk", "sort", "max", "min"}
_MOVES = {
    "to", "_to_copy", "clone", "contiguous", "alias", "detach", "view", "reshape", "_unsafe_view", "flatten", "t",
    "unsqueeze", "squeeze", "transpose", "permute", "select", "slice", "expand", "index", "index_select", "gather",
    "embedding",
}  # fmt: skip


def _counted(step: Step) -> Value:
    known = step.value("self")
    if known.has_tokens:
        raise Mixes("it counts over the tokens")
    return Value((None,))


@rule("cumsum.default", counts=True)
def _cumsum(step: Step) -> Result:
    known = step.raw(step["self"])
    if isinstance(known.content, Counts):
        return Value((None,), Offsets(known.content.order))
    return _CUMSUM(step)


_CUMSUM = along("accumulates")


@rule("_grouped_mm.default")
def _grouped_product(step: Step) -> Value:
    """Rows sorted by expert, times the weight of their expert: the groups must end where the sort says."""
    left, offsets = step.plain(step.node.args[0]), step.raw(step["offs"])
    step.require_no_tokens("mat2", "weight", "bias")
    order = left.axes[0].order if left.axes[0] is not None else None
    if not isinstance(order, fx.Node) or offsets.content != Offsets(order):
        raise Mixes("its groups of rows are not those of the sort that put the rows in order")
    return Value((left.axes[0], None))


@rule("index.Tensor")
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
    return Value((*rest[:front], *picked, *rest[front:]), _content_of_entries(known))


def _content_of_entries(known: Value) -> Content | None:
    """What the numbers of entries that are taken out of a value mean."""
    if known.content is not None and len(known.axes) > 1:
        raise Mixes("it takes parts of row numbers")
    return known.content


def _chosen_entries(known: Value, mask: Any, chosen: Value) -> Value:
    """The entries that a mask of the leading dimensions chooses."""
    count = len(chosen.axes)
    _chosen_place([unify(pair) for pair in zip(known.axes[:count], chosen.axes, strict=True)], chosen)
    return Value((Axis(1, 1, Chosen(mask)), *known.axes[count:]), _content_of_entries(known))


def _chosen_place(axes: Sequence[Axis | None], chosen: Value) -> int:
    """The one dimension of a mask that goes along the tokens, all of them in order."""
    places = [place for place, axis in enumerate(axes) if axis is not None]
    if len(places) != 1 or axes[places[0]] == BLANK or axes[places[0]].order or chosen.axes[places[0]] is None:  # type: ignore[union-attr]
        raise Mixes("it selects rows by a mask that is not one of all tokens")
    return places[0]


@rule("where.default nonzero_numpy")
def _where_is(step: Step) -> Result:
    """Where a mask is true: at every chosen entry, the number of its row, and its place within the row."""
    mask = step.node.args[0]
    chosen = step.plain(mask)
    place = _chosen_place(chosen.axes, chosen)
    entries = Value((Axis(1, 1, Chosen(mask)),))  # type: ignore[arg-type]
    numbers = Value(entries.axes, RowNumber(chosen.axes[place]))  # type: ignore[arg-type]
    return tuple(numbers if dim == place else entries for dim in range(len(chosen.axes)))


@rule("nonzero.default")
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
    return axis is not None and axis != BLANK and replace(numbers, order=None) == replace(axis, order=None)


@rule("index_select.default")
def _index_select(step: Step) -> Value:
    known = step.raw(step["self"])
    place = step.dim(step["dim"], len(known.axes))
    picked = _taken(step, known, place, step["index"]).axes
    return Value((*known.axes[:place], *picked, *known.axes[place + 1 :]), _content_of_entries(known))


@rule("index_put.default")
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


@rule("index_add.default")
def _index_add(step: Step) -> Value:
    whole, numbers, added = step.value("self"), step.raw(step["index"]), step.value("source")
    place = step.dim(step["dim"], len(whole.axes))
    axis, content = added.axes[place], numbers.content
    into = whole.axes[place]
    same_entries = isinstance(content, RowNumber) and numbers.axes == (axis,)
    if axis is None or not same_entries or into is None or (into != BLANK and not _same_rows(content.axis, into)):  # type: ignore[union-attr]
        raise Mixes(f"it adds {_BY_NUMBERS}")
    rest = broadcast(Value(value.axes[:place] + value.axes[place + 1 :]) for value in (whole, added))
    return Value((*rest[:place], replace(content.axis, order=None), *rest[place:]))  # type: ignore[union-attr]


@rule("gather.default")
def _gather(step: Step) -> Value:
    return _within_rows(step, "takes", [])


@rule("scatter scatter_add scatter_reduce")
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


RULES_OF_OTHERS["transformers::grouped_mm_fallback"] = _grouped_product
