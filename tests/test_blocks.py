"""Sections of a graph: they take what they need, and say the same as the graph in one piece."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tree_compile.blocks import Blocks, as_it_is


def halves_across_sections(ids):
    doubled = ids.float() * 2
    halves = doubled[:, : ids.shape[1] // 2] + 1
    return halves + halves.new_ones(halves.shape[1]), doubled + 1


def in_sections(function, first_of_second):
    """The graph of `function` for any number of tokens, of which the operation `first_of_second` begins a section."""
    graph_module = make_fx(function, tracing_mode="symbolic")(torch.zeros(1, 9, dtype=torch.long))
    place = 0
    for node in graph_module.graph.nodes:
        place = 1 if node.name == first_of_second else place
        node.meta["nn_module_stack"] = {"": (f"layers.{place}", torch.nn.Module)}
    return graph_module


def test_number_that_is_not_that_of_all_tokens_crosses_between_sections_as_it_is():
    whole = in_sections(halves_across_sections, "new_ones")
    blocks = Blocks(whole, as_it_is)
    ids = torch.arange(12)[None]
    assert len(blocks.blocks) == 2
    for found, expected in zip(blocks(ids), whole(ids), strict=True):
        assert torch.equal(found, expected)
