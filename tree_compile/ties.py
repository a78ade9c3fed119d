"""Choices by scores that are equal up to rounding: the unpacked model is compared with those of the tree model.

torch leaves open which of equal scores `topk` takes. Of an indexer's a tree model takes the earliest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from tree_compile.comparison import tolerance
from tree_compile.inputs import FEWEST_TOKENS
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.runtime.row import Row
from tree_compile.runtime.topk_index import above_and_at_last, highest, takes_highest, topk_told

if TYPE_CHECKING:
    from tree_compile.pipeline import Rewritten


class EarliestOfEquals(TorchFunctionMode):
    """Lets every selection of keys in a model be that of the tree model, or else take the earliest of equal scores.

    A selection of experts is that of the tree model, or else the model's own.

    Scores are often equal: to 0, where `relu` has cut off all heads, as for a padding token whose embedding is 0; up to
    rounding, where a token comes again and nothing tells its position, or in half precision. The unpacked model is
    compared under this mode, since its own choice is no better than another.

    Args:
        tokens: the length of the sequence; a selection of keys is one from scores [batch, …, tokens, keys].
        windows: sizes of the windows that are pooled into one key; there may be a key for every token as well.
        most: fewer keys are kept where this is less than the model keeps.
        made: the choices of the tree model in the order of its layers, int [tokens, k], places among the keys of the
            sequence with -1 behind them. One is taken where no key that it leaves out scores higher, up to rounding.
        rounding: what scores may differ by, relative to the highest one of a query.

    Attributes:
        ties: for how many queries the last key that was taken has the score of one that was not, up to rounding.
        fewer: in how many selections fewer keys were kept than in the model.
    """

    def __init__(
        self, tokens: int, windows: Iterable[int] = (), most: int | None = None,
        made: Iterable[Tensor] = (), rounding: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._tokens = tokens
        self._most = most
        self.ties = 0
        self.fewer = 0
        self._keys = {tokens // window for window in (1, *windows)}
        self._made = list(made)
        self._has_record = bool(self._made)
        self._rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            named = {"scores" if name == "input" else name: value for name, value in given.items()}
            if self._chooses_keys(*args, **named):
                return self._topk(*args, **named)
            if self._chooses_experts(*args, **named):
                return self._experts(*args, **named)
        return func(*args, **given)

    def _chooses_experts(
        self, scores: Tensor, k: int, dim: int = -1, largest: bool = True, *_others: Any, **_named: Any
    ) -> bool:
        is_of_tokens = k > 0 and scores.numel() == self._tokens * scores.shape[-1]
        return is_of_tokens and takes_highest(scores, dim, largest)

    def _experts(self, scores: Tensor, k: int, *others: Any, **named: Any) -> torch.return_types.topk:
        made = self._made_by_tree(scores, k)
        return scores.topk(k, *others, **named) if made is None else _sorted(scores, made, k)

    def _chooses_keys(
        self, scores: Tensor, k: int, dim: int = -1, largest: bool = True, *_others: Any, **_named: Any
    ) -> bool:
        is_of_pairs = scores.dim() > 1 and scores.shape[-2] == self._tokens and scores.shape[-1] in self._keys
        return is_of_pairs and takes_highest(scores, dim, largest)

    def _topk(self, scores: Tensor, k: int, *_others: Any, **_named: Any) -> torch.return_types.topk:
        if self._most is not None and k > self._most:
            self.fewer += 1
            k = self._most
        if k == 0:
            return scores.topk(0)
        made = self._made_by_tree(scores, k)
        if made is None and self._has_record:
            return scores.topk(k)  # of a router with as many experts as there are tokens, or a choice that is not right
        chosen, equal = highest(scores, k), above_and_at_last(scores, k)[1]
        self.ties += int((equal & ~chosen & (scores > HIDDEN_BELOW)).any(-1).sum())
        return _sorted(scores, chosen if made is None else made, k)

    def _made_by_tree(self, scores: Tensor, k: int) -> Tensor | None:
        """The first choice left that is right for these scores, filled up to `k` keys: bool, shaped like them."""
        for place, places in enumerate(self._made):
            taken = _as_mask(places, scores)
            if taken is not None and self._is_right(taken, scores, k):
                del self._made[: place + 1]
                return highest(scores.masked_fill(taken, torch.inf), k)
        return None

    def _is_right(self, taken: Tensor, scores: Tensor, k: int) -> bool:
        """Whether `k` keys, or all that can be seen, were taken, and none left out that scores higher."""
        seen = scores > HIDDEN_BELOW
        size = scores.abs().masked_fill(~seen | scores.isinf(), 0).amax(-1, keepdim=True)
        last, rounding = scores.topk(k).values[..., -1:], self._rounding * size
        are_enough = taken.sum(-1) == seen.sum(-1).clamp(max=k)
        are_best = torch.where(taken, scores >= last - rounding, ~seen | (scores <= last + rounding))
        return bool(are_enough.all()) and bool(are_best.all())


def _sorted(scores: Tensor, chosen: Tensor, k: int) -> torch.return_types.topk:
    """The `k` scores of each row that are `chosen`, the highest first, and their places."""
    places = chosen.nonzero()[:, -1].view(*scores.shape[:-1], k)
    ordered = scores.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return torch.return_types.topk((ordered.values, places.gather(-1, ordered.indices)))


def telling_of_experts(rewritten: Rewritten) -> Rewritten:
    """`rewritten`, with routers that tell what they choose; parameters are the same objects."""
    topk = torch.ops.aten.topk.default
    if not any(node.target is topk for node in rewritten.graph_module.graph.nodes):
        return rewritten
    graph = copy.deepcopy(rewritten.graph_module.graph)
    for node in graph.nodes:
        node.target = topk_told if node.target is topk else node.target
    return replace(rewritten, graph_module=fx.GraphModule(rewritten.graph_module, graph))


def _as_mask(places: Tensor, scores: Tensor) -> Tensor | None:
    """Places [tokens, k] as bool, shaped like the scores [1, …, tokens, keys]; None where they are not of such."""
    keys = scores.shape[-1]
    if scores.numel() != len(places) * keys or int(places.max()) >= keys:
        return None
    mask = scores.new_zeros((len(places), keys + 1), dtype=torch.bool)
    mask.scatter_(1, places.long() % (keys + 1), True)  # -1 is the last column, which is of no key
    return mask[:, :keys].view_as(scores)


def choices_of(row: Row, made: Iterable[Tensor]) -> list[Tensor]:
    """Those of what a row `made` that are of its tokens."""
    return [own for own in made if len(own) == max(len(row.tokens), FEWEST_TOKENS)]


def ties_of(
    rewritten: Rewritten, tokens: int, made: Iterable[Tensor] = ()
) -> AbstractContextManager[EarliestOfEquals | None]:
    """How the unpacked model is run on `tokens` tokens to be compared with `rewritten`, which has `made` choices."""
    made = list(made)
    if not rewritten.has_indexer and not made:
        return nullcontext()
    most = None if rewritten.most_kept is None else rewritten.most_kept.keys
    windows = [window for window, _ in rewritten.windows]
    return EarliestOfEquals(tokens, windows, most, made, tolerance(rewritten.dtypes))
