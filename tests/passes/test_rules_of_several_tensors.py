"""Rules of the token-axis proof ask for every tensor that their operators compute with."""

import pytest
import torch
from torch import fx

from tree_compile.passes import token_axis  # noqa: F401, all the rules
from tree_compile.passes.axes import Mixes, Value
from tree_compile.passes.nodes import arguments
from tree_compile.passes.token_rules import RULES, Step, elementwise

aten = torch.ops.aten
ROWS, ROW, SQUARE, BATCHES = torch.ones(2, 4), torch.ones(4), torch.ones(4, 4), torch.ones(2, 4, 4)
PLACES, PLACE, TRUTHS = torch.zeros(2, 4, dtype=torch.long), torch.zeros(4, dtype=torch.long), torch.ones(4) > 0
CHANNELS = (ROW, ROW + 0, ROW + 1, ROW + 2)

CALLS = {
    aten._fused_rms_norm.default: (ROWS, [4], ROW, None),
    aten._grouped_mm.default: (SQUARE, BATCHES, torch.tensor([2, 4], dtype=torch.int32), None),
    aten.addmm.default: (ROW, ROWS, SQUARE),
    aten.baddbmm.default: (SQUARE, BATCHES, BATCHES + 1),
    aten.batch_norm.default: (ROWS, *CHANNELS, False, 0.1, 1e-5, False),
    aten.bincount.default: (PLACE, ROW),
    aten.bmm.default: (BATCHES, BATCHES + 1),
    aten.broadcast_to.default: (ROW, [2, 4]),
    aten.bucketize.Tensor: (ROWS, ROW),
    aten.cat.default: ([ROWS, ROWS + 1],),
    aten.conv1d.default: (BATCHES, torch.ones(4, 4, 1), ROW),
    aten.conv1d.padding: (BATCHES, torch.ones(4, 4, 1), ROW),
    aten.conv2d.default: (BATCHES[None], torch.ones(4, 2, 1, 1), ROW),
    aten.conv2d.padding: (BATCHES[None], torch.ones(4, 2, 1, 1), ROW),
    aten.conv3d.default: (BATCHES[None, :, :, None], torch.ones(4, 2, 1, 1, 1), ROW),
    aten.conv3d.padding: (BATCHES[None, :, :, None], torch.ones(4, 2, 1, 1, 1), ROW),
    aten.cosine_similarity.default: (ROWS, ROWS + 1),
    aten.diff.default: (ROWS, 1, -1, ROWS + 1, ROWS + 2),
    aten.div.Tensor_mode: (ROWS, ROWS + 1),
    aten.dot.default: (ROW, ROW + 1),
    aten.einsum.default: ("ij,jk->ik", [ROWS, SQUARE]),
    aten.embedding.default: (SQUARE, PLACES),
    aten.expand_as.default: (ROW, ROWS),
    aten.floor_divide.default: (ROWS, ROWS + 1),
    aten.gather.default: (ROWS, 1, PLACES),
    aten.ger.default: (ROW, ROW + 1),
    aten.group_norm.default: (ROWS, 2, ROW, ROW + 1),
    aten.index.Tensor: (SQUARE, [PLACE, PLACE + 1]),
    aten.index_add.default: (SQUARE, 0, PLACE, SQUARE + 1),
    aten.index_put.default: (ROW, [PLACE], ROW + 1),
    aten.index_select.default: (SQUARE, 0, PLACE),
    aten.instance_norm.default: (torch.ones(2, 4, 3), *CHANNELS, False, 0.1, 1e-5, False),
    aten.layer_norm.default: (ROWS, [4], ROW, ROW + 1),
    aten.linear.default: (ROWS, SQUARE, ROW),
    aten.matmul.default: (ROWS, SQUARE),
    aten.mm.default: (ROWS, SQUARE),
    aten.mv.default: (ROWS, ROW),
    aten.native_layer_norm.default: (ROWS, [4], ROW, ROW + 1, 1e-5),
    aten.outer.default: (ROW, ROW + 1),
    aten.prelu.default: (ROWS, ROW),
    aten.reshape_as.default: (ROWS, ROWS + 1),
    aten.rms_norm.default: (ROWS, [4], ROW),
    aten.scatter.reduce: (ROWS, 1, PLACES, ROWS + 1),
    aten.scatter.src: (ROWS, 1, PLACES, ROWS + 1),
    aten.scatter.value: (ROWS, 1, PLACES, 1),
    aten.scatter.value_reduce: (ROWS, 1, PLACES, 1),
    aten.scatter_add.default: (ROWS, 1, PLACES, ROWS + 1),
    aten.scatter_reduce.two: (ROWS, 1, PLACES, ROWS + 1, "sum"),
    aten.select_scatter.default: (ROWS, ROW, 0, 1),
    aten.slice_scatter.default: (ROWS, ROWS[:1], 0, 0, 1),
    aten.stack.default: ([ROWS, ROWS + 1],),
    aten.tensor_split.tensor_indices_or_sections: (ROWS, torch.tensor([1]), 1),
    aten.to.other: (ROWS, ROWS + 1),
    aten.view_as.default: (ROWS, ROWS + 1),
}
"""A call of every operator with several tensors that has a rule of its own."""
KEYWORDS = {
    aten.div.Tensor_mode: {"rounding_mode": "floor"},
    aten.scatter.reduce: {"reduce": "add"},
    aten.scatter.value_reduce: {"reduce": "add"},
}


def takes_several_tensors(operator):
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return sum("Tensor" in kind for kind in kinds) > 1 or any("List[Tensor]" in kind for kind in kinds)


def test_every_operator_of_several_tensors_is_called_here():
    own = {operator for operator, rule in RULES.items() if rule is not elementwise and hasattr(operator, "_schema")}
    assert {op for op in own if takes_several_tensors(op) and not op._schema.is_mutable} <= set(CALLS)


def step_of(operator):
    graph, known = fx.Graph(), {}

    def placed(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"tensor_{len(known)}")
        node.meta["val"] = value
        known[node] = Value((None,) * value.dim())
        return node

    args, keywords = CALLS[operator], KEYWORDS.get(operator, {})
    node = graph.call_function(operator, tuple([*map(placed, a)] if isinstance(a, list) else placed(a) for a in args))
    node.kwargs = keywords
    node.meta["val"] = operator(*args, **keywords)
    return Step(node, known, None, arguments(node))


def followed(step):
    """The step, once its rule has seen it."""
    try:
        RULES[step.node.target](step)
    except Mixes:
        # Of sorted rows, others are refused.
        assert step.node.target in (aten._grouped_mm.default, aten.index_put.default, aten.index_add.default)
    return step


@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_rule_asks_for_every_tensor(operator):
    assert followed(step_of(operator)).unread() == []
