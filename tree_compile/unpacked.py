"""The model as it is called on one sequence at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tree_compile.foreign import experts_of_any_dtype
from tree_compile.replay import Routing, replayed, routing_of
from tree_compile.runtime.recordings import ROUTED


@dataclass(frozen=True)
class PlainModel:
    """A model with the names and constants of its calls.

    Attributes:
        model: a causal language model that takes token ids int64 `(1, T)`.
        input_names: names of its inputs, token ids first.
        keywords: constant keyword arguments of every call.
    """

    model: nn.Module
    input_names: tuple[str, ...]
    keywords: Mapping[str, Any]

    def __call__(self, values: Sequence[Tensor]) -> Any:
        """Calls the model on inputs int64 `(1, T)`: the first by position, so that its name is free, the rest by name.

        Recorded experts, int64 `(1, T, layers, top_k)`, are no argument: they are what its routers choose.

        Raises:
            ReplayError: recorded experts cannot take the place of what its routers choose.
            ValueError: there are more or fewer values than names.
        """
        named = dict(zip(self.input_names[1:], values[1:], strict=True))
        with experts_of_any_dtype(self.model), self._routed(values[0], named.pop(ROUTED, None)):
            return _without_balance_loss(self.model(values[0], **named, **self.keywords))

    def _routed(self, ids: Tensor, recorded: Tensor | None) -> contextlib.AbstractContextManager[None]:
        if recorded is None:
            return contextlib.nullcontext()
        # A capture has to know that both have one T.
        return replayed(self.routing, recorded.expand(1, ids.shape[1], -1, -1))

    @cached_property
    def routing(self) -> Routing:
        """Its routers.

        Raises:
            ReplayError: it has none that are known.
        """
        return routing_of(self.model)

    def shaped(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole numbers int64 `(1, T)` for every input, as what the model takes: recorded experts for their numbers."""
        named = zip(self.input_names, values, strict=True)
        return tuple(self.routing.choices_of(value) if name == ROUTED else value for name, value in named)

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter or buffer; the CPU where it has none."""
        return device_of(self.model)


def _without_balance_loss(output: Any) -> Any:
    """A `ModelOutput` without its `aux_loss`.

    It is no sum over tokens: that of a batch is made of `router_logits`, and not of the losses of its sequences.
    """
    has_both = isinstance(output, Mapping) and {"aux_loss", "router_logits"} <= output.keys()
    if not has_both or not hasattr(output, "aux_loss"):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "aux_loss"})


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's first parameter or buffer; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn inside, on the CPU and on `device`, leaves torch's random numbers as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Weights that autocast casts inside are cast for what is inside alone.

    Autocast would keep those of a call without gradients, and use them in a later call that needs gradients.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
