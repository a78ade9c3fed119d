"""Arguments that describe one padded batch, and models that are already wrapped, are refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

from tests.errors.refusal import Tiny, require_refusal
from tree_compile import Sample, losses, plan_rows, treecompile
from tree_compile.errors import (
    CaptureError,
    LostGradientError,
    StaleOutputError,
    TokenMixingError,
    UnknownOpError,
    UnsupportedArgumentError,
    WrappedModelError,
)
from tree_compile.passes.plan_inputs import PLAN_INPUTS, TREE_INPUTS
from tree_compile.tiny import tiny_model

SEQUENCES = [[1, 2, 3], [1, 2, 4, 5]]


def plain():
    return Tiny(lambda model, x, ids: model.project[0](x))


# Arguments

ARGUMENTS = [
    ("labels", torch.tensor([[1]]), "losses.sft(model([Sample(tokens)"),
    ("attention_mask", torch.ones(1, 3), "without padding"),
    ("position_ids", torch.arange(3)[None], "its place in its own sequence"),
    ("cache_position", torch.arange(3), "its place in its own sequence"),
    ("past_key_values", None, "passed whole"),
    ("logits_to_keep", 1, "out.logits[i]"),
    ("num_logits_to_keep", 1, "out.logits[i]"),
    ("inputs_embeds", torch.ones(1, 3, 8), "pass token ids"),
    ("use_cache", True, "implied"),
]


class TakesAny(Tiny):
    def forward(self, ids, **others):
        return super().forward(ids)


def takes_any():
    return treecompile(TakesAny(lambda model, x, ids: model.project[0](x)), min_shared_tokens=1, backend="eager")


GIVEN = [lambda inputs: inputs, plan_rows, lambda inputs: plan_rows(inputs).rows[0]]


@pytest.mark.parametrize("given", GIVEN, ids=["dict", "plan", "row"])
@pytest.mark.parametrize("name", [*PLAN_INPUTS, *TREE_INPUTS, "self", "torch", "class", "two words", ""])
def test_input_whose_name_the_code_of_a_graph_cannot_have_is_refused(name, given):
    for inputs in ({"input_ids": SEQUENCES, name: SEQUENCES}, {name: SEQUENCES}):
        with pytest.raises(UnsupportedArgumentError, match=f"`{name}` cannot be the name of an input"):
            takes_any()(given(inputs))


@pytest.mark.parametrize("given", GIVEN, ids=["dict", "plan", "row"])
def test_payload_of_one_padded_batch_is_refused_wherever_it_is_given(given):
    for name in ("labels", "position_ids"):
        with pytest.raises(UnsupportedArgumentError, match=f"`{name}` cannot be used"):
            takes_any()(given({"input_ids": SEQUENCES, name: SEQUENCES}))


@pytest.mark.parametrize("given", GIVEN, ids=["dict", "plan", "row"])
def test_tokens_may_have_any_name_since_they_are_passed_by_position(given):
    model = takes_any()
    for out in (model(given({"labels": SEQUENCES})), model(given({"labels": SEQUENCES, "kind": SEQUENCES}))):
        torch.testing.assert_close(out[0], model.unpacked(torch.tensor(SEQUENCES[:1]))[0])


@pytest.mark.parametrize(("name", "value", "hint"), ARGUMENTS, ids=[name for name, *_ in ARGUMENTS])
def test_argument_of_one_padded_batch_is_refused(name, value, hint):
    model = treecompile(plain(), backend="eager")
    calls = [
        lambda: model(SEQUENCES, **{name: value}),
        lambda: treecompile(plain(), backend="eager", forward_kwargs={name: value}),
        lambda: model({"input_ids": SEQUENCES, name: SEQUENCES}),
        lambda: model({"input_ids": torch.ones(2, 3, dtype=torch.int64), name: torch.ones(2, 3)}),
    ]
    for call in calls:
        with pytest.raises(UnsupportedArgumentError, match=f"`{name}`") as raised:
            call()
        assert hint in raised.value.hint
        assert raised.value.why


@pytest.mark.parametrize(
    ("others", "hint"), [({}, "as the first argument"), ({"attention_mask": torch.ones(2, 4)}, r"ids\[mask == 1\]")]
)
def test_sequences_by_name_are_refused_with_the_way_to_pass_them(others, hint):
    with pytest.raises(UnsupportedArgumentError, match=hint):
        treecompile(plain(), backend="eager")(input_ids=SEQUENCES, **others)
    with pytest.raises(UnsupportedArgumentError, match="as the first argument"):
        treecompile(plain(), backend="eager", forward_kwargs={"input_ids": 1})


@pytest.mark.parametrize("form", [torch.tensor, np.array])
def test_padding_is_taken_off_as_the_hint_says(form):
    batch = {"input_ids": form([[1, 2, 3], [4, 5, 0]]), "attention_mask": form([[1, 1, 1], [1, 1, 0]])}
    with pytest.raises(UnsupportedArgumentError) as raised:
        treecompile(plain(), backend="eager")(batch)
    line = raised.value.hint[raised.value.hint.index("[ids[") :].partition(";")[0]
    assert [ids.tolist() for ids in eval(line, dict(batch))] == [[1, 2, 3], [4, 5]]
    assert "model(batch['input_ids'])" in raised.value.hint


class TakesMask(Tiny):
    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


class TakesKind(Tiny):
    def forward(self, ids, kind=None):
        return super().forward(ids)


@pytest.mark.parametrize(
    ("model", "hint"),
    [(TakesMask, "without padding"), (TakesKind, "{'input_ids': […], 'kind': […]}"), (Tiny, "'a_payload': […]")],
)
def test_second_argument_by_position_is_refused_by_its_name(model, hint):
    tree = treecompile(model(lambda model, x, ids: x), backend="eager")
    with pytest.raises(UnsupportedArgumentError) as raised:
        tree(SEQUENCES, SEQUENCES)
    assert hint in raised.value.hint


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class WithLoss(Tiny):
    def forward(self, ids):
        logits = super().forward(ids)
        return {"loss": loss_of(logits, ids), "logits": logits}


class MeanLoss(Tiny):
    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        return logits if targets is None else (F.cross_entropy(logits[0], targets[0]), logits)


class NeedsLabels(Tiny):
    def forward(self, ids, labels):
        return loss_of(super().forward(ids), labels)


@pytest.mark.parametrize(
    ("model", "inputs", "error"),
    [
        (WithLoss, SEQUENCES, TokenMixingError),
        (MeanLoss, {"input_ids": SEQUENCES, "targets": SEQUENCES}, UnknownOpError),
        (NeedsLabels, SEQUENCES, CaptureError),
    ],
)
def test_model_that_returns_its_loss_is_told_where_a_loss_is_computed(model, inputs, error):
    tree = treecompile(model(lambda model, x, ids: x), backend="eager")
    with pytest.raises(error) as raised:
        tree(inputs)
    assert "-out.logprobs[i]" in raised.value.hint
    assert raised.value.where.file == __file__


def test_refused_model_without_a_loss_is_told_nothing_of_one():
    with pytest.raises(TokenMixingError) as raised:
        treecompile(Tiny(lambda model, x, ids: x.cumsum(1)), backend="eager")(SEQUENCES)
    assert "loss" not in raised.value.hint


def test_call_without_sequences_is_refused():
    with pytest.raises(TypeError, match="takes the sequences"):
        treecompile(plain(), backend="eager")()


def test_tree_model_inside_of_torch_compile_is_exact():
    tree = treecompile(plain().double(), min_shared_tokens=1, backend="eager")
    torch.testing.assert_close(torch.compile(tree)(SEQUENCES)[1], tree(SEQUENCES)[1])


def test_loss_is_computed_as_the_hint_says():
    model, labels = treecompile(tiny_model("llama"), min_shared_tokens=1, backend="eager"), SEQUENCES
    with pytest.raises(UnsupportedArgumentError) as raised:
        model(SEQUENCES, labels=labels)
    _, code = raised.value.hint.split(": ", 1)
    names = {"model": model, "sequences": SEQUENCES, "losses": losses, "Sample": Sample}
    exec(code, names)
    pairs = [(model.unpacked(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])) for ids in SEQUENCES]
    expected = nn.functional.cross_entropy(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    torch.testing.assert_close(names["loss"], expected)


def test_attribute_that_an_output_does_not_have_is_refused_with_what_it_has():
    out = treecompile(plain(), backend="eager", self_check=False)(SEQUENCES)
    with pytest.raises(AttributeError, match=r"compute it from -out\.logprobs\[i\]"):
        _ = out.loss
    with pytest.raises(AttributeError, match=r"out\[i\] is the model's output"):
        _ = out.hidden_states


def test_unknown_argument_is_refused_with_the_two_ways_to_pass_it():
    model = treecompile(plain(), backend="eager")
    with pytest.raises(UnsupportedArgumentError) as raised:
        model(SEQUENCES, token_type_ids=SEQUENCES)
    assert "model({'input_ids': […], 'token_type_ids': […]})" in raised.value.hint
    assert "forward_kwargs={'token_type_ids': …}" in raised.value.hint


@pytest.mark.parametrize(
    ("inputs", "keywords", "why"),
    [
        ({"input_ids": SEQUENCES, "kind": SEQUENCES}, {}, "unexpected keyword argument 'kind'"),
        ({"input_ids": SEQUENCES}, {"kind": 1}, "unexpected keyword argument 'kind'"),
        ({"input_ids": SEQUENCES, "kind": SEQUENCES}, {"kind": 1}, "multiple values for keyword argument 'kind'"),
    ],
)
def test_argument_that_forward_does_not_take_is_refused(inputs, keywords, why):
    with pytest.raises(UnsupportedArgumentError, match=why):
        treecompile(plain(), backend="eager", forward_kwargs=keywords)(inputs)


def misspelt(model, x, ids):
    return F.relu(x, inplce=True)


def test_wrong_argument_inside_of_the_model_is_named_at_its_line():
    require_refusal(Tiny(misspelt), CaptureError, "F.relu(x, inplce=True)", "as one graph", __file__)


def test_output_of_attention_weights_is_refused():
    model = treecompile(
        tiny_model("llama", attn_implementation="eager"), backend="eager", forward_kwargs={"output_attentions": True}
    )
    with pytest.raises(TokenMixingError, match="something else than the values"):
        model(SEQUENCES)


# Wrapped models


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh):
    model = plain()
    fully_shard(model, mesh=mesh)
    return model


def sharded_inside(mesh):
    model = plain()
    fully_shard(model.project[0], mesh=mesh)
    return model


def compiled_in_place(_mesh):
    model = plain()
    model.project[0].compile(backend="eager")
    return model


WRAPPED = [
    ("DDP", lambda _: nn.parallel.DistributedDataParallel(plain()), "DistributedDataParallel(treecompile(model))"),
    ("DataParallel", lambda _: nn.DataParallel(plain()), "DistributedDataParallel(treecompile(model))"),
    ("FSDP", lambda _: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")), "fully_shard(treecompile"),
    ("fully_shard", sharded, "fully_shard(treecompile(model))"),
    ("fully_shard inside", sharded_inside, "fully_shard(treecompile(model))"),
    ("DTensor", lambda mesh: distribute_module(plain(), mesh), "shard after that"),
    ("torch.compile", lambda _: torch.compile(plain()), "treecompile compiles it"),
    ("module.compile", compiled_in_place, "treecompile compiles it"),
    ("treecompile", lambda _: treecompile(plain()), "`unpacked`"),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "hint"), [case[1:] for case in WRAPPED], ids=[case[0] for case in WRAPPED])
def test_wrapped_model_is_refused(process_group, wrap, hint):
    model = wrap(process_group)
    with pytest.raises(WrappedModelError) as raised:
        treecompile(model)
    assert hint in raised.value.hint


def test_model_that_is_wrapped_later_is_refused_at_the_first_call(process_group):
    model = plain()
    tree = treecompile(model, backend="eager")
    fully_shard(model.project[0], mesh=process_group)
    with pytest.raises(WrappedModelError):
        tree(SEQUENCES)


@pytest.mark.parametrize(
    "wrap", [nn.parallel.DistributedDataParallel, fully_shard], ids=["DistributedDataParallel", "fully_shard"]
)
def test_wrapping_the_tree_model_is_exact(process_group, wrap):
    model = Tiny(lambda model, x, ids: x)
    del model.project, model.gain, model.rows
    expected = [model(torch.tensor([sequence]))[0] for sequence in SEQUENCES]
    torch.stack([part.square().sum() for part in expected]).sum().backward()
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    out = wrap(treecompile(model, min_shared_tokens=1, backend="eager"))(SEQUENCES)
    for part, of_model in zip(out, expected, strict=True):
        torch.testing.assert_close(part, of_model)
    torch.stack([part.square().sum() for part in out]).sum().backward()
    found = model.head.weight.grad
    torch.testing.assert_close(getattr(found, "to_local", lambda: found)(), gradient)


def test_logits_after_parameters_were_sharded_again_are_refused(process_group):
    model = Tiny(lambda model, x, ids: x)
    del model.project, model.gain, model.rows
    tree = fully_shard(treecompile(model, min_shared_tokens=1, backend="eager"), reshard_after_forward=True)
    out = tree(SEQUENCES)
    with pytest.raises(StaleOutputError, match="reshard_after_forward=False"):
        len(out.logits[0])


@pytest.mark.parametrize("original", [False, True])
def test_tree_model_inside_of_fsdp1_is_refused(process_group, original):
    model = plain()
    del model.rows  # the name of a method of tree models, which FSDP puts parameters beside
    wrapped = FullyShardedDataParallel(
        treecompile(model, backend="eager"), device_id=torch.device("cpu"), use_orig_params=original
    )
    with pytest.raises(WrappedModelError, match="FullyShardedDataParallel"):
        wrapped(SEQUENCES)


def loss_with(tree, tensors):
    return torch.func.functional_call(tree, tensors, (SEQUENCES,))[0].sum()


@pytest.mark.parametrize("call", [loss_with, lambda tree, tensors: torch.func.grad(loss_with, 1)(tree, tensors)])
def test_functional_call_with_plain_tensors_is_refused(call):
    tree = treecompile(plain(), backend="eager")
    with pytest.raises(WrappedModelError, match="functional_call"):
        call(tree, {name: parameter.detach() for name, parameter in tree.named_parameters()})


def test_functional_call_with_parameters_is_exact():
    model = plain().double()
    tree = treecompile(model, min_shared_tokens=1, backend="eager")
    tree(SEQUENCES)
    others = {name: nn.Parameter(2 * parameter.detach()) for name, parameter in model.named_parameters()}
    out = torch.func.functional_call(tree, others, (SEQUENCES,))
    expected = torch.func.functional_call(model, others, (torch.tensor([SEQUENCES[1]]),))
    torch.testing.assert_close(out[1], expected[0])


def test_ddp_finds_the_parameters_that_are_not_used(process_group):
    model = plain()
    wrapped = nn.parallel.DistributedDataParallel(
        treecompile(model, min_shared_tokens=1, backend="eager"), find_unused_parameters=True
    )
    for _ in range(2):
        torch.stack([part.square().sum() for part in wrapped(SEQUENCES)]).sum().backward()
    assert model.project[0].weight.grad is not None


def three_times_the_sum(_state, bucket):
    return allreduce_hook(None, bucket).then(lambda reduced: reduced.value() * 3)


def test_ddp_with_a_static_graph_reduces_gradients(process_group):
    gradients = []
    for is_static in (False, True):
        torch.manual_seed(0)
        model = Tiny(lambda model, x, ids: x)
        del model.project, model.gain, model.rows
        tree = treecompile(model, min_shared_tokens=1, backend="eager")
        wrapped = nn.parallel.DistributedDataParallel(tree, static_graph=is_static)
        wrapped.register_comm_hook(None, three_times_the_sum)
        for _ in range(3):
            tree.zero_grad()
            wrapped(SEQUENCES).logprobs[0].sum().backward()
            gradients.append(model.head.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hook_of_the_tree_model_is_refused(hook):
    tree = treecompile(plain(), backend="eager")
    handle = getattr(tree, hook)(lambda *_: None)
    with pytest.raises(LostGradientError, match="TreeModel has a backward hook"):
        tree(SEQUENCES)
    handle.remove()
    assert len(tree(SEQUENCES)) == len(SEQUENCES)


def test_parameters_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = plain()
    with pytest.raises(CaptureError, match="meta device"):
        treecompile(model)


@pytest.mark.parametrize("was_called", [False, True])
def test_model_that_is_moved_to_the_meta_device_is_refused_at_its_next_call(was_called):
    tree = treecompile(plain(), backend="eager")
    if was_called:
        tree(SEQUENCES)
    tree.to("meta")
    for call in (lambda: tree(SEQUENCES), tree.check, tree.explain):
        with pytest.raises(CaptureError, match="meta device"):
            call()


def test_buffer_on_the_meta_device_is_refused():
    model = plain()
    model.table = model.table.to("meta")
    with pytest.raises(CaptureError, match="buffer table is on the meta device"):
        treecompile(model)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not function"):
        treecompile(lambda ids: ids)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "tpu"}, "backend is 'tpu'; it must be one of"),
        ({"objective": "best"}, "objective is 'best'; it must be one of"),
        ({"row_tokens": 0}, "row_tokens is 0; it must be"),
        ({"min_shared_tokens": -1}, "min_shared_tokens is -1; it must be"),
        ({"pad_rows": True}, "row_tokens is None; it must be the length to pad to"),
    ],
    ids=str,
)
def test_option_without_meaning_is_refused(options, error):
    with pytest.raises(ValueError, match=error):
        treecompile(plain(), **options)
