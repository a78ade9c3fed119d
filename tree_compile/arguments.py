"""Arguments of causal language models that have no meaning on a list of sequences, and what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import nn

from tree_compile.errors import UnsupportedArgumentError
from tree_compile.runtime.sequences import PADDED_HINT

MASK = "attention_mask"
"""What padded sequences come with: it says more than the names beside it."""
LOSS_HINT = (
    "compute it from -out.logprobs[i], or with samples: "
    "loss = losses.sft(model([Sample(tokens) for tokens in sequences]), normaliser='per_token')"
)
_LAST_HINT = "take the part that you want of out.logits[i]: out[i] is computed for all tokens."
_PLACE_HINT = "leave it out: a token's position is its place in its own sequence."
HINTS = {
    "labels": LOSS_HINT,
    "logits_to_keep": _LAST_HINT,
    "num_logits_to_keep": _LAST_HINT,
    MASK: f"leave it out: model(batch['input_ids']), where the tokenizer did not pad; else {PADDED_HINT}",
    "position_ids": _PLACE_HINT,
    "cache_position": _PLACE_HINT,
    "past_key_values": "leave it out: sequences are passed whole.",
    "inputs_embeds": "pass token ids.",
    "use_cache": "leave it out: use_cache=False is implied.",
    "input_ids": "pass them as the first argument, model([tokens, …]), without padding and its mask; with payloads, "
    "model({'input_ids': [tokens, …], 'a_payload': [values, …]}).",
}
_WHY_LAST = "the last tokens of a row are not the last tokens of its sequences."
_WHY = {
    "labels": "the model would mix the losses of all sequences of a row, and count shared tokens once.",
    "logits_to_keep": _WHY_LAST,
    "num_logits_to_keep": _WHY_LAST,
    "use_cache": "sequences are computed whole, so nothing is kept for a next call.",
    "input_ids": "a call takes the sequences by position, as a list.",
}
_WHY_OTHERS = "it describes one padded batch, which a tree of sequences is not."


def unsupported(name: str) -> UnsupportedArgumentError:
    """The error for an argument `name` of a call."""
    if name in HINTS:
        return UnsupportedArgumentError(
            f"`{name}` cannot be used with a tree model.", why=_WHY.get(name, _WHY_OTHERS), hint=HINTS[name]
        )
    return UnsupportedArgumentError(
        f"A tree model takes no argument `{name}` in a call.",
        why="a call takes the sequences alone.",
        hint=f"per token: pass it with the tokens, model({{'input_ids': […], '{name}': […]}}); "
        f"constant: treecompile(model, forward_kwargs={{'{name}': …}}).",
    )


def _as_input(name: str) -> str:
    return f"pass model({{'input_ids': […], '{name}': […]}}), and compute the loss from out.logprobs[i]."


def check_payloads(names: Iterable[str], model: nn.Module) -> None:
    """Refuses payloads of samples that seem to be meant for the model, as `model` takes arguments.

    Raises:
        UnsupportedArgumentError: one has the name of an argument of its forward.
    """
    given = tuple(names)
    taken = inspect.signature(model.forward).parameters if given else {}
    for name in given:
        if name in taken and taken[name].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise UnsupportedArgumentError(
                f"The payload `{name}` of the samples has the name of an argument of the model's forward.",
                why="payloads of samples are for losses: the model would run without it, and prefixes would be shared "
                "where it differs.",
                hint=f"for a loss, give it another name; for the model, {HINTS.get(name, _as_input(name))}",
            )


def by_position(model: nn.Module) -> UnsupportedArgumentError:
    """The error for a second argument that is given by position, as `model` takes it."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return unsupported(names[1] if len(names) > 1 else "a_payload")
