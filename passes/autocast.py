"""What a model computes with autocast switched off stays so, also where autocast is on around the tree model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from tree_compile.passes.finding import Finding
from tree_compile.runtime.autocast import kept_off, without_autocast

AUTOCAST_OFF = "tree_compile_autocast_off"
"""Meta key of nodes that the model computes with autocast switched off: the type of device that it is off for."""


def switch_off_autocast(node: fx.Node, device: str) -> None:
    """Notes that the model computes `node` with autocast switched off for devices of the type `device`.

    Where autocast is off anyway there is nothing to note: the program for calls under autocast is another one.
    """
    if torch.is_autocast_enabled(device):
        node.meta[AUTOCAST_OFF] = device


def as_the_model(meta: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """The autocast under which the model computes a node with this `meta`."""
    device = meta.get(AUTOCAST_OFF)
    return contextlib.nullcontext() if device is None else torch.autocast(device, enabled=False)


@dataclass(frozen=True)
class KeepAutocastOff:
    """Lets every operation run under the autocast that the model has there; the last pass, since it hides operators."""

    name: str = field(default="autocast", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        for node in graph_module.graph.nodes:
            if AUTOCAST_OFF in node.meta and isinstance(node.meta.get("val"), Tensor | tuple | list):
                _keep_off(node, node.meta[AUTOCAST_OFF])
        return ()


def _keep_off(node: fx.Node, device: str) -> None:
    target: Any = node.target
    if isinstance(target, OpOverload):
        node.target, node.args = without_autocast, (device, target, *node.args)
    elif isinstance(target, FunctionType):  # which a rewrite put there; what is built in only picks from tuples
        node.target, node.args = kept_off(target), (device, *node.args)
