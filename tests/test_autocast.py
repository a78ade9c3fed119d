"""Under autocast a tree model computes what the unpacked model computes under it, whichever call came first."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_compile import treecompile
from tree_compile.errors import CaptureError
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig
from tree_compile.runtime.causal_convolution import token_shift
from tree_compile.runtime.mixers import mixer
from tree_compile.runtime.row_tree import RowTree
from tree_compile.tiny import tiny_model

WIDTH, HEADS, VOCABULARY = 32, 2, 64
LONG = torch.randint(0, VOCABULARY, (600,), generator=torch.Generator().manual_seed(0)).tolist()
"""bfloat16 rounds positions from 257 on."""
SEQUENCES = [LONG, [*LONG[:590], 3, 4]]


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


class Rotary(nn.Module):
    """Attends with a rotary table that is a product, made with autocast off; its gate is computed without it too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("frequencies", 0.5 ** torch.arange(WIDTH // HEADS // 2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        with torch.autocast("cpu", enabled=False):
            angle = (self.frequencies[:, None] @ torch.arange(ids.shape[1], dtype=torch.float32)[None]).T
            gate = (30 * self.gate(x)).sin()
        cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1)
        )
        turned = [part * cosine + part.roll(WIDTH // HEADS // 2, -1) * sine for part in (query, key)]
        out = F.scaled_dot_product_attention(*turned, value.to(turned[0].dtype), is_causal=True)
        return self.head(x + gate * out.transpose(1, 2).flatten(-2))


def results(call: Callable[[], list[Tensor]], model: nn.Module) -> list[Tensor]:
    """Outputs, and the gradients of all parameters."""
    outputs = call()
    loss = torch.stack([part.float().square().sum() for part in outputs]).sum()
    with torch.autocast("cpu", enabled=False):  # as one trains: the backward pass is outside of autocast
        return [*(part.detach() for part in outputs), *torch.autograd.grad(loss, list(model.parameters()))]


def require_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert float((one.float() - other.float()).norm() / other.float().norm()) <= tolerance


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def tiny(name: str) -> nn.Module:
    return tiny_model(name, max_position_embeddings=1_024)


CASES = [
    pytest.param(Rotary, (nullcontext, autocast), id="rotary outside first"),
    pytest.param(Rotary, (autocast, nullcontext), id="rotary inside first"),
    pytest.param(lambda: tiny("llama"), (nullcontext, autocast), id="llama"),
    pytest.param(lambda: tiny("gpt2"), (autocast,), id="gpt2"),
]


@pytest.mark.parametrize(("make", "places"), CASES)
def test_call_under_autocast_is_that_of_the_unpacked_model(
    make: Callable[[], nn.Module], places: Sequence[Callable[[], AbstractContextManager[Any]]]
) -> None:
    model = make().eval()
    tree = treecompile(model, backend="eager")
    for place in places:
        with place():
            ours = results(lambda: [logits(part) for part in tree(SEQUENCES)], model)
            theirs = results(lambda: [logits(model(torch.tensor([tokens])))[0] for tokens in SEQUENCES], model)
        require_close(ours, theirs, 1e-4 if place is nullcontext else 2e-2)


def test_compiled_blocks_keep_autocast_off_where_the_model_does() -> None:
    model = Rotary().eval()
    tree = treecompile(model)
    assert "attention_without_autocast" not in tree.graph()
    with autocast():
        ours = results(lambda: list(tree(SEQUENCES)), model)
        theirs = results(lambda: [model(torch.tensor([tokens]))[0] for tokens in SEQUENCES], model)
        assert "without_autocast" in tree.graph()
        exec(tree.graph(), {})
    require_close(ours, theirs, 2e-2)


class Attends(Rotary):
    """Attends with autocast off."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(ids)


def test_model_that_switches_autocast_off_is_as_exact_under_autocast() -> None:
    model = Attends().eval()
    tree = treecompile(model, backend="eager")
    with autocast():
        ours = results(lambda: list(tree(SEQUENCES)), model)
        theirs = results(lambda: [model(torch.tensor([tokens]))[0] for tokens in SEQUENCES], model)
    require_close(ours, theirs, 1e-4)


@mixer(tokens={"values": 1, "weight": None}, like="values")
def twice_shifted(values: Tensor, weight: Tensor, tree: RowTree | None = None) -> Tensor:
    """An op of a user's own, with a product that autocast would round."""
    return token_shift(values @ weight.T, tree)


def shifts(model: Rotary, x: Tensor) -> Tensor:
    return token_shift(x)


def shifts_a_product(model: Rotary, x: Tensor) -> Tensor:
    return twice_shifted(x, model.gate.weight)


def pools_windows(model: Rotary, x: Tensor) -> Tensor:
    """Attends to the 5 tokens before and to the means of 4 tokens each, every one less half of that before it."""
    tokens, entries = torch.arange(x.shape[1]), x.shape[1] // 4
    means = x[:, : entries * 4].view(1, entries, 4, WIDTH).mean(2)
    means = means - F.pad(means, (0, 0, 1, 0), value=0.5)[:, :entries] / 2
    distance, closed = tokens[:, None] - tokens, torch.arange(entries) < (tokens[:, None] + 1) // 4
    keys = torch.cat([x[:, None], means[:, None]], 2)
    mask = torch.cat([(distance >= 0) & (distance < 5), closed], -1)
    return F.scaled_dot_product_attention(model.gate(x)[:, None], keys, keys, mask[None])[:, 0]


class MixesWithAutocastOff(Rotary):
    def __init__(self, mix: Callable[[Rotary, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        with torch.autocast("cpu", enabled=False):
            x = x + self.mix(self, x)
            return self.head(x + self.gate(self.project(x)[..., :WIDTH]))


@pytest.mark.parametrize("mix", [shifts, shifts_a_product, pools_windows])
def test_every_op_of_a_row_is_kept_out_of_autocast(mix: Callable[[Rotary, Tensor], Tensor]) -> None:
    model = MixesWithAutocastOff(mix).eval()
    tree = treecompile(model, backend="eager", min_shared_tokens=1, self_check=False)
    sequences = [LONG[:30], [*LONG[:17], *LONG[:6]]]
    with autocast():
        ours = results(lambda: list(tree(sequences)), model)
        theirs = results(lambda: [model(torch.tensor([tokens]))[0] for tokens in sequences], model)
        exec(tree.graph(), {})
    require_close(ours, theirs, 1e-4)


def test_first_call_without_gradients_leaves_later_ones_their_gradients() -> None:
    """Autocast keeps the weights that it has cast, also for calls that need gradients."""
    model = Rotary().eval()
    tree = treecompile(model, backend="eager")
    with autocast():
        with torch.no_grad():
            tree.explain()
        gradients = results(lambda: list(tree(SEQUENCES)), model)[len(SEQUENCES) :]
    assert all(bool(gradient.any()) for gradient in gradients)


def test_every_autocast_keeps_its_program() -> None:
    tree = treecompile(Rotary().eval(), backend="eager", self_check=False)
    programs = []
    for place in (nullcontext, autocast, nullcontext, autocast):
        with place():
            programs.append(tree._program(("input_ids",)))
    assert programs[0] is programs[2]
    assert programs[1] is programs[3]
    assert programs[0] is not programs[1]


class Switches(Rotary):
    """Attends with autocast off, which it switches by a function."""

    def forward(self, ids: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", False)
        try:
            return super().forward(ids)
        finally:
            torch.set_autocast_enabled("cpu", True)


def test_model_that_switches_autocast_by_a_function_is_refused_with_its_line() -> None:
    tree = treecompile(Switches().eval(), backend="eager", self_check=False)
    with autocast(), pytest.raises(CaptureError, match="switches autocast itself") as raised:
        tree(SEQUENCES)
    assert raised.value.where is not None
    assert raised.value.where.code == 'torch.set_autocast_enabled("cpu", False)'
    assert "set_autocast_enabled" in vars(torch)


@pytest.mark.parametrize("make", [lambda: Dense(DenseConfig(layers=1)), lambda: SparseMLA(SparseMLAConfig(layers=1))])
def test_float64_model_under_autocast_computes_in_float64(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    trained = [parameter for name, parameter in model.named_parameters() if "indexer" not in name]
    found = []
    for call in (lambda: list(tree_model(SEQUENCES)), lambda: [model(torch.tensor([ids]))[0] for ids in SEQUENCES]):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = call()
        loss = torch.stack([part.square().sum() for part in outputs]).sum()
        found.append([*outputs, *torch.autograd.grad(loss, trained)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float64
        assert float((one - other).abs().max()) <= 1e-9 * max(1.0, float(other.abs().max()))
