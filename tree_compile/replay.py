"""Routers that send tokens to recorded experts, instead of to those that they would choose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tree_compile.errors import ReplayError
from tree_compile.passes.source import line_of_forward
from tree_compile.patches import replaced
from tree_compile.runtime.counts import count_of


@dataclass(frozen=True, eq=False)
class Routing:
    """The routers of a model.

    Attributes:
        routers: in the order of the layers.
        top_k: how many experts each of them chooses.
        experts: from how many.
    """

    routers: tuple[nn.Module, ...]
    top_k: int
    experts: int

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts of one token's recording."""
        return len(self.routers), self.top_k

    def choices_of(self, numbers: Tensor) -> Tensor:
        """Some choice for each of `numbers` int64 [1, T], to try: int64 [1, T, layers, top_k]."""
        layers = torch.arange(len(self.routers), device=numbers.device)[:, None]
        places = torch.arange(self.top_k, device=numbers.device)
        return (numbers[..., None, None] + layers + places) % self.experts


def routing_of(model: nn.Module) -> Routing:
    """The routers of a model: its modules whose class is called …Router, as those of transformers are.

    Raises:
        ReplayError: it has none, or they do not choose equally many experts from equally many.
    """
    routers = [module for module in model.modules() if _is_router(module)]
    sizes = {(_top_k(router), _experts(router)) for router in routers}
    if not routers:
        raise _refused(model, "The model has no router that is known.", "a router is a module of a class …Router that "
                       "has `top_k` and a weight [experts, width], as those of transformers")  # fmt: skip
    if len(sizes) > 1:
        shown = ", ".join(f"{k} of {experts}" for k, experts in sorted(sizes))
        raise _refused(model, f"The model's routers choose differently many experts: {shown}.",
                       "a recording has one number of experts for all layers")  # fmt: skip
    return Routing(tuple(routers), *sizes.pop())


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int)


def _top_k(router: nn.Module) -> int:
    found: Any = router.top_k
    return int(found)


def _experts(router: nn.Module) -> int:
    return next((weight.shape[0] for weight in router.parameters() if weight.dim() == 2), 0)


@contextlib.contextmanager
def replayed(routing: Routing, recorded: Tensor) -> Iterator[None]:
    """What is called inside sends its tokens to `recorded` experts, int64 [1, T, layers, top_k].

    Where a router would take the greatest of its scores, it takes those of the recorded experts: all that follows, such
    as a normalisation of their weights, is the router's own, and so are the gradients.

    Raises:
        ReplayError: a router does not choose by one `topk` of scores [tokens, experts], or is called more than once.
    """
    # In front of all layers, so that these have the same code. The remainder changes nothing: it tells the proof what
    # numbers there are.
    numbers = (recorded % routing.experts).select(0, 0)
    by_router = {id(router): numbers.select(1, layer) for layer, router in enumerate(routing.routers)}
    left = set(by_router)
    with contextlib.ExitStack() as stack:
        for kind in {type(router) for router in routing.routers}:
            forward = functools.wraps(kind.forward)(_forward(kind.forward, routing, by_router, left))
            stack.enter_context(replaced(kind, "forward", forward))
        yield
    if left:
        router = next(router for router in routing.routers if id(router) in left)
        raise _not_one_choice(router, "is not called")


def _forward(
    original: Callable[..., Any], routing: Routing, by_router: Mapping[int, Tensor], left: set[int]
) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in by_router:
            return original(self, *args, **kwargs)
        if id(self) not in left:
            raise _not_one_choice(self, "is called more than once")
        left.remove(id(self))
        choosing = _Choosing(by_router[id(self)], routing)
        with choosing:
            result = original(self, *args, **kwargs)
        choosing.check(self)
        return result

    return forward


class _Choosing(TorchFunctionMode):
    """Puts a recorded choice in the place of `topk` over the experts."""

    def __init__(self, recorded: Tensor, routing: Routing) -> None:
        super().__init__()
        self._recorded, self._routing = recorded, routing
        self._choices: list[_Choice] = []
        self._chooses_groups = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        scores, k = args[0], args[1] if len(args) > 1 else kwargs.get("k")
        if (k, scores.shape[-1], scores.dim()) != (self._routing.top_k, self._routing.experts, 2):
            self._chooses_groups = True
            return func(*args, **kwargs)
        self._choices.append(_Choice(scores, self._recorded))
        return self._choices[-1]

    def check(self, router: nn.Module) -> None:
        """Refuses a router that has not chosen once, or whose weights are 0 outside of the groups it would choose."""
        if len(self._choices) != 1:
            raise _not_one_choice(router, f"takes {count_of(len(self._choices), 'topk', 'topk')} over its experts")
        if self._chooses_groups and self._choices[0].values_are_read:
            raise _not_one_choice(router, "takes its weights from the groups of experts that it chose")


class _Choice:
    """What `torch.topk` returns, of recorded indices; notes whether the values are read."""

    def __init__(self, scores: Tensor, recorded: Tensor) -> None:
        self._scores = scores
        self.indices = recorded
        self.values_are_read = False

    @property
    def values(self) -> Tensor:
        """The scores of the recorded experts, [tokens, top_k]."""
        self.values_are_read = True
        return self._scores.gather(1, self.indices)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.indices))

    def __getitem__(self, place: int) -> Tensor:
        return self.indices if place in (1, -1) else self.values


def _not_one_choice(router: nn.Module, what: str) -> ReplayError:
    why = "a recorded choice takes the place of one `topk` of scores [tokens, experts] in each router"
    return _refused(router, f"The router {type(router).__name__} {what}.", why)


def _refused(module: nn.Module, what: str, why: str) -> ReplayError:
    hint = "leave the payload `routed_experts` out."
    return ReplayError(what, where=line_of_forward(module), why=f"{why}.", hint=hint)
