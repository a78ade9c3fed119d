"""Routers that send tokens to recorded experts, instead of to those that they would choose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

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
        ReplayError: it has none, or they do not choose equally many experts from equally many, or do not say so.
    """
    routers = [module for module in model.modules() if _is_router(module)]
    sizes = {(_top_k(router), _experts(router)) for router in routers}
    for router in routers:
        if not _experts(router):
            raise _refused(router, f"The router {type(router).__name__} has no parameter [experts, width].",
                           "nothing else says from how many experts it chooses")  # fmt: skip
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
    """From how many experts it chooses; 0 where nothing says so."""
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
        choosing.check(self, result)
        return result

    return forward


class _Choosing(TorchFunctionMode):
    """Puts a recorded choice in the place of `topk` over the experts, and follows what other choices have a part in."""

    def __init__(self, recorded: Tensor, routing: Routing) -> None:
        super().__init__()
        self._recorded, self._routing = recorded, routing
        self._choices = 0
        self._of_other_choices: dict[int, Any] = {}
        """By their ids, which are theirs as long as they are kept."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = _asked(args, kwargs) if func in (torch.topk, Tensor.topk) else None
        if asked is not None and self._is_of_experts(asked):
            return self._replayed(asked.scores)
        result = func(*args, **kwargs)
        if asked is not None:
            self._note(result)
        self._follow((args, kwargs), (result, args[:1] if _writes(func) else ()))
        return result

    def _is_of_experts(self, asked: _TopK) -> bool:
        form = (asked.k, asked.scores.shape[-1], asked.scores.dim())
        is_last = asked.dim in (-1, asked.scores.dim() - 1)
        return is_last and asked.largest and form == (self._routing.top_k, self._routing.experts, 2)

    def _replayed(self, scores: Tensor) -> torch.return_types.topk:
        self._choices += 1
        values = scores.gather(1, self._recorded)
        self._follow(scores, values)
        return torch.return_types.topk((values, self._recorded))

    def _follow(self, given: Any, result: Any) -> None:
        """Notes `result` where something of `given` is noted."""
        if any(id(value) in self._of_other_choices for value in pytree.tree_leaves(given)):
            self._note(result)

    def _note(self, result: Any) -> None:
        tensors = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        self._of_other_choices.update((id(tensor), tensor) for tensor in tensors)

    def check(self, router: nn.Module, result: Any) -> None:
        """Refuses a router that has not chosen once, or whose weights are 0 outside of the groups it would choose."""
        if self._choices != 1:
            raise _not_one_choice(router, f"takes {count_of(self._choices, 'topk', 'topk')} over its experts")
        if any(id(value) in self._of_other_choices for value in pytree.tree_leaves(result)):
            raise _not_one_choice(router, "takes its weights from the groups of experts that it chose")


class _TopK(NamedTuple):
    """The arguments of `topk`."""

    scores: Tensor
    k: int
    dim: int = -1
    largest: bool = True
    sorted: bool = True
    out: Any = None


def _asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _TopK:
    return _TopK(*args, **{"scores" if name == "input" else name: value for name, value in kwargs.items()})


def _writes(func: Callable[..., Any]) -> bool:
    """Whether it writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _not_one_choice(router: nn.Module, what: str) -> ReplayError:
    why = "a recorded choice takes the place of one `topk` of scores [tokens, experts] in each router"
    return _refused(router, f"The router {type(router).__name__} {what}.", why)


def _refused(module: nn.Module, what: str, why: str) -> ReplayError:
    hint = "leave the payload `routed_experts` out."
    return ReplayError(what, where=line_of_forward(module), why=f"{why}.", hint=hint)
