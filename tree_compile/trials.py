"""Compares two ways through a model's code at one length, on several inputs.

Where the ways differ on certain token ids alone, these are numbers in the code: they are tried as well.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tree_compile.comparison import (
    Computed,
    are_close,
    gradients_of,
    smallest_parameters,
    tensors_of,
    trained_parameters,
    weights_of,
)
from tree_compile.errors import TreeCompileError
from tree_compile.foreign import plain_checkpoints
from tree_compile.passes.limits import rows_of_inputs
from tree_compile.rehearsal import untouched
from tree_compile.unpacked import PlainModel, own_random_numbers

_DRAWS = 3
_MOST_DRAWS = 16
_FEW = 64
_MOST_WORK = 1 << 38


def same_at(plain: PlainModel, graph: Callable[..., Any], tokens: int) -> bool | None:
    """Whether what was captured of a model computes what the model does for sequences of `tokens` tokens.

    With the same random numbers; outputs, and gradients where they are cheap.

    Returns:
        None where one of both takes no sequence of so many tokens: only what is captured for many may fail for one.
    """
    with torch.enable_grad(), untouched(plain.model), plain_checkpoints(plain.model):
        numbers = _numbers_of_one(*(_calls(compute, _plainest(plain, tokens)) for compute in (plain, _flat(graph))))
        inputs = trials(plain, getattr(graph, "graph", None), tokens, numbers)
        parameters = smallest_parameters(trained_parameters(plain.model)) if _is_cheap(plain, tokens) else {}
        dtypes = _dtypes(getattr(graph, "graph", None))
        for place, values in enumerate(inputs):
            expected = _computed(plain, values, parameters)
            found = _computed(_flat(graph), values, parameters)
            if place == 0 and (expected is None or (found is None and tokens == 1)):
                return None
            if expected is not None and not _is_close(found, expected, dtypes):
                return False
    return True


def _is_cheap(plain: PlainModel, tokens: int) -> bool:
    """Whether a backward pass over so many tokens is, in time and in memory."""
    return tokens * sum(parameter.numel() for parameter in plain.model.parameters()) <= _MOST_WORK


def _computed(
    compute: Callable[[tuple[Tensor, ...]], Any], values: tuple[Tensor, ...], parameters: Mapping[str, nn.Parameter]
) -> Computed | None:
    """Outputs and gradients; None where the inputs cannot be taken."""
    own = tuple(value.clone() for value in values)
    try:
        with own_random_numbers(values[0].device), torch.set_grad_enabled(bool(parameters)):
            parts = [tensors_of(compute(own))]
            gradients = gradients_of(parts, weights_of(parts), parameters)
    except TreeCompileError:
        raise
    except Exception:
        return None
    return [part.detach() for part in parts[0]], list(gradients.values())


def _dtypes(graph: fx.Graph | None) -> set[torch.dtype]:
    """What a graph computes in, which may be coarser than what it returns."""
    values = [node.meta.get("val") for node in graph.nodes] if graph is not None else []
    return {value.dtype for value in values if isinstance(value, Tensor)}


def _is_close(found: Computed | None, expected: Computed, dtypes: set[torch.dtype]) -> bool:
    if found is None:
        return False
    return are_close(found, expected, dtypes | {part.dtype for part in expected[0]})


def _flat(graph: Callable[..., Any]) -> Callable[[tuple[Tensor, ...]], Any]:
    return lambda values: graph(*values)


def trials(
    plain: PlainModel, graph: fx.Graph | None, tokens: int, numbers: Sequence[int]
) -> Iterator[tuple[Tensor, ...]]:
    """Inputs `(1, tokens)` of a model: the plainest, random ones, and ones made of `numbers`.

    `graph` is what was captured of the model, which tells how many token ids there are; None for two.
    """
    rows = rows_of_inputs(graph) if graph is not None else []
    sizes = [rows[place] if place < len(rows) else None for place in range(len(plain.input_names))]
    generator = torch.Generator().manual_seed(0)
    yield _plainest(plain, tokens)
    drawn = [[torch.randint(size or 2, (tokens,), generator=generator) for size in sizes] for _ in range(_DRAWS)]
    for values in (*drawn, *_of_numbers(numbers, sizes, tokens)):
        yield plain.shaped([value[None].to(plain.device) for value in values])


def _plainest(plain: PlainModel, tokens: int) -> tuple[Tensor, ...]:
    return plain.shaped([(torch.arange(tokens, device=plain.device) % 2)[None] for _ in plain.input_names])


def _of_numbers(numbers: Sequence[int], sizes: Sequence[int | None], tokens: int) -> Iterator[list[Tensor]]:
    """Every input filled with the numbers, as far as it takes them."""
    own = [[number for number in numbers if size is None or number < size] or [0] for size in sizes]
    draws = min(-(-max(map(len, own)) // tokens), _MOST_DRAWS) if numbers else 0
    endless = [itertools.cycle(one) for one in own]
    for _ in range(draws):
        yield [torch.tensor(list(itertools.islice(one, tokens))) for one in endless]


def numbers_at_one(plain: PlainModel, *lengths: int) -> list[int]:
    """Whole numbers in the code that is run at one of two lengths alone, with their neighbours."""
    with untouched(plain.model):
        return _numbers_of_one(*(_calls(plain, _plainest(plain, length)) for length in lengths))


_Calls = Counter[tuple[Any, tuple[int, ...]]]


def _numbers_of_one(here: _Calls | None, there: _Calls | None) -> list[int]:
    """Whole numbers among the arguments of operators that are called on one side alone, with their neighbours."""
    if here is None or there is None:
        return []
    found = {number for _, numbers in (here - there) + (there - here) for number in numbers}
    return sorted({near for number in found for near in (number - 1, number, number + 1) if near >= 0})


def _calls(compute: Callable[[tuple[Tensor, ...]], Any], values: tuple[Tensor, ...]) -> _Calls | None:
    watch = _Watch()
    try:
        with torch.no_grad(), watch:
            compute(values)
    except TreeCompileError:
        raise
    except Exception:
        return None  # some operators of higher order cannot be watched
    return watch.calls


class _Watch(TorchDispatchMode):
    """Counts the operators that are called, each with the whole numbers among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: _Calls = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls[function, tuple(_whole_numbers((*args, *kwargs.values())))] += 1
        return function(*args, **kwargs)


def _whole_numbers(args: Any) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from _whole_numbers(arg)
        elif isinstance(arg, Tensor) and not arg.is_floating_point() and not arg.is_complex() and arg.numel() <= _FEW:
            yield from arg.flatten().tolist()
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == arg and abs(arg) < 1 << 40:
            yield int(arg)
