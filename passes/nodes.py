"""What every pass asks of a node."""

from __future__ import annotations

from typing import Any

from torch import fx


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, defaults filled in.

    A function that has no schema has its keyword arguments here alone.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= {argument.name: given for argument, given in zip(schema.arguments, node.args, strict=False)}
    return values | dict(node.kwargs)
