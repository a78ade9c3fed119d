"""Loops over the experts that were hit, which no graph can hold, as loops over all experts while a capture lasts.

An expert that was not hit gets no rows, so both loops add up the same terms in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tree_compile.patches import replaced


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, self.hidden_size)
    weights = [weight.view(-1, self.ffn_hidden_size, self.hidden_size) for weight in _weights(self.mlp)]
    result = torch.zeros_like(rows)
    for expert in range(self.num_experts):
        token, slot = torch.where(top_k_index == expert)
        states = self.mlp(rows[token], *(weight[expert] for weight in weights))
        result = result.index_add(0, token, states * top_k_weights[token, slot, None])
    return result.view(hidden_states.shape[0], -1, self.hidden_size)


def _weights(mlp: Any) -> tuple[Tensor, Tensor, Tensor]:
    return mlp.w1, mlp.v1, mlp.w2


def _longcat_flash(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    result = torch.zeros_like(hidden_states)
    for expert in range(self.total_experts):
        token, slot = torch.where(top_k_index == expert)
        states = hidden_states[token]
        if expert < self.num_routed_experts and self.gate_up_proj is not None:
            gate, up = F.linear(states, self.gate_up_proj[expert]).chunk(2, dim=-1)
            states = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
        result = result.index_add(0, token, (states * top_k_weights[token, slot, None]).to(result.dtype))
    return result


_LOOPS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts"): _dbrx,
    ("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): _longcat_flash,
}


@contextlib.contextmanager
def loops_over_all_experts(model: nn.Module) -> Iterator[None]:
    """`model` with the known loops over experts replaced; the classes get their own `forward` back."""
    kinds = {type(module) for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if (loop := _LOOPS.get((kind.__module__, kind.__name__))) is not None:
                stack.enter_context(replaced(kind, "forward", loop))
        yield
