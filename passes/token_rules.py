"""Rules of the token-axis proof: for every operation, when it works token by token, and what comes out.

A rule takes a `Step` (a node with what is known of its inputs) and returns what is known of its result, or raises
`Mixes` with the reason. Rules are data: one entry of `RULES` per operator. Add your own with `register_token_rule`.
Here are those that work element by element; `rules_of_layout`, `rules_of_products` and `rules_of_rows` have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.axes import (
    Keys,
    Mixes,
    RowNumber,
    Value,
    broadcast,
)
from tree_compile.passes.nodes import operator_name
from tree_compile.passes.shapes import Extent, extent, is_size, is_tensor, shape_of, size_expression

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
        read: the tensors among them that the rule has asked for.
    """

    node: fx.Node
    known: Mapping[fx.Node, Result]
    symbol: sympy.Symbol
    arguments: Mapping[str, Any]
    read: set[fx.Node] = field(default_factory=set)

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
        self.read.add(argument)
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
        """f for a size f * T or f * (T // m), 0 for a size without T."""
        return self.extent(size).factor

    def extent(self, size: Any) -> Extent:
        """How a size mentions T."""
        found = extent(size, self.symbol)
        if found is None:
            raise Mixes(f"it makes a dimension of size {size_expression(size)}, where T is the number of tokens")
        return found

    def out_factors(self) -> list[int]:
        """Factors of the result's sizes."""
        return [self.factor(size) for size in shape_of(self.node)]

    def dim(self, dim: Any, rank: int) -> int:
        """A dimension counted from the front."""
        return int(dim) % max(rank, 1)

    def dims(self, dims: Any, rank: int) -> list[int]:
        """One dimension or several, counted from the front."""
        return [self.dim(dim, rank) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]

    def dims_or_all(self, dims: Any, rank: int) -> set[int]:
        """As `dims`; all of them where none is given."""
        return set(range(rank) if dims is None or dims == [] else self.dims(dims, rank))

    def require_no_tokens(self, *names: str) -> None:
        """Refuses arguments that depend on the tokens; those that the operator does not have do not."""
        for name in names:
            if self.raw(self.arguments.get(name)).has_tokens:
                raise Mixes(f"its {name} depends on the tokens")

    def unread(self) -> list[tuple[str, fx.Node]]:
        """The tensors that the rule has not asked for, though their numbers count, and the arguments that they are in.

        A function without a schema is one of this package's, which takes tensors of the plan.
        """
        if not hasattr(self.node.target, "_schema"):
            return []
        of_shape = SHAPE_ALONE.get(operator_name(self.node))
        return [
            (name, leaf)
            for name, argument in self.arguments.items()
            for leaf in _leaves([argument], {})
            if name != of_shape and is_tensor(leaf) and leaf not in self.read
        ]


Rule = Callable[[Step], Result]
RULES: dict[Any, Rule] = {}
RULES_OF_OTHERS: dict[str, Rule] = {}
"""Rules of operators that other libraries register, by name, since they need not be installed."""
TAKE_SIZES: set[Rule] = set()
"""Rules that look at arguments that depend on T themselves; such an argument of any other operation is refused."""
COUNT: set[Rule] = set()
"""Rules whose result may be counts over a sort, or sums of them; from any other, they may be those of another sort."""
SHAPE_ALONE = {
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), "self"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), "self"),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as", "to"), "other"),
}
"""By the names of operators, the argument of which they take no numbers."""


def register_token_rule(operator: Any, rule: Rule) -> None:
    """Adds or replaces the rule of an operator (an `OpOverload`, or a function that graphs call).

    Args:
        operator: such as `torch.ops.mylib.scale.default`.
        rule: takes a `Step`, returns the `Value` of the result, or raises `Mixes`. `elementwise` is one.
    """
    RULES[operator] = rule


def operators(names: str) -> list[Any]:
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


def rule(names: str, *, takes_sizes: bool = False, counts: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of aten, named as for `operators`.

    `takes_sizes` puts it into TAKE_SIZES, `counts` into COUNT.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators(names), function))
        if takes_sizes:
            TAKE_SIZES.add(function)
        if counts:
            COUNT.add(function)
        return function

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


rule(
    "dropout fill zero masked_fill where.ScalarOther where.ScalarSelf where.Scalar copy polar rsub "
    "__and__ __or__ multiply divide.Tensor divide.Scalar subtract true_divide absolute negative greater greater_equal "
    "less less_equal not_equal isclose isreal hardswish log_sigmoid special_xlogy special_expm1 special_log1p "
    "special_exp2 arccos arctan arctan2 ldexp fix"
)(elementwise)


@rule("to _to_copy clone contiguous alias detach lift_fresh_copy", counts=True)
def _same(step: Step) -> Value:
    known = step.raw(step["self"])
    if known.content is not None and step.node.meta["val"].dtype not in HOLD_ROW_NUMBERS:
        return step.value("self")
    return known


HOLD_ROW_NUMBERS = {torch.int32, torch.int64, torch.float32, torch.float64}


@rule("floor_divide div.Tensor_mode div.Scalar_mode")
def _floor_divide(step: Step) -> Value:
    """The row number of an entry, divided by the entries per token, is the number of its token."""
    known = step.raw(step["self"])
    content = known.content
    if not isinstance(content, RowNumber):
        return elementwise(step)
    if step.arguments.get("rounding_mode", "floor") == "floor" and content.axis.right == step["other"]:
        return Value(known.axes, RowNumber(replace(content.axis, right=1)))
    raise Mixes("it divides row numbers by something else than the number of entries per token")


@rule("remainder.Scalar fmod.Scalar")
def _remainder(step: Step) -> Value:
    known = step.raw(step["self"])
    if isinstance(known.content, RowNumber) and known.content.axis.right == step["other"]:
        return known.without_content()
    return elementwise(step)
