"""A model whose indexers keep fewer keys, so that on a short sequence, too, there are some that they leave out."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import fx

from tree_compile.pipeline import MostKept, Rewritten
from tree_compile.runtime.topk_index import tree_topk_index
from tree_compile.runtime.window_attention import topk_entries

_CHOICES = (tree_topk_index, topk_entries)


def keeping_at_most(rewritten: Rewritten, most: int) -> Rewritten:
    """`rewritten`, with indexers that keep `most` keys where they keep more; parameters are the same objects."""
    graph = copy.deepcopy(rewritten.graph_module.graph)
    choices = [node for node in graph.nodes if node.target in _CHOICES and node.args[-1] > most]
    for node in choices:
        node.args = (*node.args[:-1], most)
    graph_module = fx.GraphModule(rewritten.graph_module, graph)
    return replace(rewritten, graph_module=graph_module, most_kept=MostKept(most, len(choices)))
