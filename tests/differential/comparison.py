"""The unpacked model, sequence by sequence, against the tree model and against a packed row without the rewrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tree_compile import Plan, TreeModel

Logits = list[Tensor]


@dataclass(frozen=True)
class Result:
    """Outputs of every sequence, and the gradient of every parameter."""

    logits: Logits
    gradients: dict[str, Tensor]


def run(model: nn.Module, logits_of: Callable[[], Sequence[Tensor]], seed: int = 0) -> Result:
    """Outputs, and gradients of a loss that gives every output of every sequence a random weight of its own."""
    model.zero_grad()
    logits = list(logits_of())
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in logits]
    loss = sum((part * weight.to(part.dtype)).sum() for part, weight in zip(logits, weights, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert all(bool(tensor.isfinite().all()) for tensor in (*logits, *gradients.values()))
    return Result([part.detach() for part in logits], gradients)


def unpacked(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Result:
    """The model on every sequence alone."""
    return run(model, lambda: [_logits(model, torch.tensor(sequence)) for sequence in sequences])


def packed(tree_model: TreeModel, sequences: Sequence[Sequence[int]] | Plan) -> Result:
    """The tree model on all sequences."""
    return run(tree_model.unpacked, lambda: list(tree_model(sequences).logits))


def packed_without_rewrite(model: nn.Module, plan: Plan) -> Result:
    """The unpacked model on the packed rows, as if each row were one sequence."""

    def logits_of() -> Logits:
        rows = [_logits(model, torch.from_numpy(row.tokens)) for row in plan.rows]
        return [rows[plan.row_of(i)][plan.rows[plan.row_of(i)].path(i)] for i in range(plan.sequences)]

    return run(model, logits_of)


def require_exact(
    tree_model: TreeModel, plan: Plan, sequences: Sequence[Sequence[int]], tolerance: float, of_gradients: float = 0.0
) -> None:
    """Outputs and gradients are those of the unpacked model, and those of packed rows without the rewrite are not.

    `of_gradients` is the tolerance for gradients, where it is another one.
    """
    of_gradients = of_gradients or tolerance
    reference = unpacked(tree_model.unpacked, sequences)
    result = packed(tree_model, plan)
    without_rewrite = packed_without_rewrite(tree_model.unpacked, plan)
    assert output_difference(reference, result) < tolerance
    assert gradient_difference(reference, result) < of_gradients
    assert output_difference(reference, without_rewrite) > 100 * tolerance
    assert gradient_difference(reference, without_rewrite) > 100 * of_gradients


def output_difference(one: Result, other: Result) -> float:
    """The greatest difference of outputs, relative to the greatest output."""
    scale = max(float(part.abs().max()) for part in one.logits)
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True)) / scale


def gradient_difference(one: Result, other: Result) -> float:
    """The greatest difference of a parameter's gradient, relative to the greatest gradient of that parameter.

    A parameter whose gradient is a million times smaller than that of another has only its rounding left.
    """
    assert one.gradients.keys() == other.gradients.keys()
    smallest = 1e-6 * max(float(gradient.abs().max()) for gradient in one.gradients.values())
    return max(
        float((gradient - other.gradients[name]).abs().max()) / max(float(gradient.abs().max()), smallest)
        for name, gradient in one.gradients.items()
    )


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens[None])
    logits = out if isinstance(out, Tensor) else out.logits
    return logits[0]
