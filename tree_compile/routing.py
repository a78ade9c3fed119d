"""What routers do with the tokens of a batch: how many go to each expert, and the loss that evens it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tree_compile.errors import OutputError
from tree_compile.output import TreeOutput
from tree_compile.row_result import RowResult
from tree_compile.runtime.counts import a_kind, count_of
from tree_compile.runtime.options import check_within

__all__ = ["expert_counts", "load_balancing"]


def expert_counts(out: TreeOutput, *, top_k: int) -> Tensor:
    """How many tokens of all sequences of `out` have an expert among the `top_k` of the greatest logits.

    A token counts once for every sequence through it. Those of rows, of calls and of ranks add up.

    Args:
        out: of sequences or samples; its model returns `router_logits`.
        top_k: how many experts a token goes to.

    Returns:
        int64 [layers, experts], for the layers that have a router.

    Raises:
        OutputError: the model does not return the logits of its routers.
        ValueError: `top_k` is not between 1 and the number of experts.
    """
    return torch.stack([_counts(result, top_k) for result in require_output(out).row_results]).sum(0)


def require_output(out: Any) -> TreeOutput:
    """The output of a call, and no part of it.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(out, TreeOutput):
        return out
    raise TypeError(
        f"a loss is of the output of a call, a TreeOutput, and not of a {type(out).__name__}: "
        "losses.sft(tree_model(samples), …), or for out in tree_model.rows(samples)"
    )


def load_balancing(out: TreeOutput, *, top_k: int, counts: Tensor | None = None) -> Tensor:
    """Load balancing between experts (Switch Transformers, Fedus et al., arXiv 2101.03961, eq. 4 to 6).

    E sum_e f_e P_e for E experts, where f_e is the number of a token's `top_k` experts that are e, and P_e the
    softmax of the router's logits at e, each the mean over all tokens of all sequences and over all layers: what
    `load_balancing_loss_func` of transformers computes of the logits of all sequences, one after the other. The first
    tokens of sequences count as all others do, whatever `trainable` says. No gradient goes through f_e.

    A product of two means over the whole batch is no sum over its rows. Where `out` is a part of the batch, pass the
    `counts` over all of it; then the losses of the parts add up to that of the batch, and so do their gradients:

        with torch.no_grad():
            counts = sum(losses.expert_counts(out, top_k=2) for out in tree_model.rows(plan))
        for out in tree_model.rows(plan):
            losses.load_balancing(out, top_k=2, counts=counts).backward()

    Args:
        out: of sequences or samples; its model returns `router_logits`.
        top_k: how many experts a token goes to.
        counts: those of `expert_counts`, int64 [layers, experts], of the whole batch.

    Returns:
        One number, float32 at least.

    Raises:
        OutputError: the model does not return the logits of its routers, or `out` is a part of a batch and `counts`
            are left out.
        ValueError: `top_k` is not between 1 and the number of experts, or `counts` have another shape or type, or are
            not those of a batch that `out` is a part of.
    """
    require_output(out)
    if counts is None:
        _require_whole_batch(out)
        counts = expert_counts(out, top_k=top_k)
    else:
        _check_counts(counts, out, top_k)
    probabilities = torch.stack([_probabilities(result) for result in out.row_results]).sum(0)
    chosen = counts.sum(0).to(probabilities)
    tokens = chosen.sum() / top_k  # of all layers
    return counts.shape[1] * (chosen / tokens * (probabilities / tokens)).sum()


def _check_counts(counts: Tensor, out: TreeOutput, top_k: int) -> None:
    """Refuses counts that are not those of a batch that `out` is a part of."""
    layers = [layer for result in out.row_results[:1] for layer in result.router_logits]
    shape = (len(layers), layers[0].shape[1])
    check_within("top_k", top_k, shape[1], "experts")
    if not isinstance(counts, Tensor):
        raise ValueError(f"counts is {a_kind(counts)}; it must be a tensor, the sum of losses.expert_counts")
    if counts.shape != shape or counts.dtype != torch.int64:
        raise ValueError(
            f"counts has shape {tuple(counts.shape)} and type {counts.dtype}; "
            f"it must be [layers, experts], {shape}, of torch.int64"
        )
    # Each expert's may differ under dropout, and so is not compared.
    own = top_k * sum(int(result.row.sequence_length.sum()) for result in out.row_results)
    of_layers = counts.sum(1).tolist()
    if min(of_layers) < own or max(of_layers) > min(of_layers) or bool((counts < 0).any()):
        raise ValueError(
            f"counts has {', '.join(map(str, of_layers))} choices of each layer, and this output alone has {own}; "
            "it must be the sum of losses.expert_counts(out, top_k=…) over the whole batch"
        )


def _require_whole_batch(out: TreeOutput) -> None:
    sequences = out.row_results[0].row.batch_sequences
    if sequences is None or len(out) < sequences:
        batch = "which more may come" if sequences is None else f"{sequences:,}"
        raise OutputError(
            f"The output has {count_of(len(out), 'sequence')} of a batch of {batch}.",
            why="balance is a product of two means over the whole batch, so those of its rows do not add up.",
            hint="pass the sum of losses.expert_counts(out, top_k=…) over all rows as counts=…; or compute all rows in "
            "one call, tree_model(samples).",
        )


def _counts(result: RowResult, top_k: int) -> Tensor:
    """Those of one row, int64 [layers, experts]."""
    counts = []
    for logits, weights in _layers(result):
        experts = logits.shape[1]
        count = check_within("top_k", top_k, experts, "experts")
        chosen = logits.detach().topk(count).indices
        counts.append(weights.new_zeros(experts).index_add(0, chosen.flatten(), weights.repeat_interleave(count)))
    return torch.stack(counts)


def _probabilities(result: RowResult) -> Tensor:
    """The sum over all layers and all tokens of the sequences of one row, [experts]."""
    # No product of matrices, which autocast would round.
    return torch.stack([(weights[:, None] * _softmax(own)).sum(0) for own, weights in _layers(result)]).sum(0)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def _layers(result: RowResult) -> Iterator[tuple[Tensor, Tensor]]:
    """For each router its logits [T, experts], and through how many sequences each token is, int64 [T]."""
    through = torch.from_numpy(result.row.sequences_through)
    for logits in result.router_logits:
        yield logits[: len(through)], through.to(logits.device)
