"""Tree models in several threads, and copies of them."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.errors.refusal import Tiny, merged, tree_model
from tree_compile.patches import replaced

SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6]]


def attends(model, x, ids):
    return merged(F.scaled_dot_product_attention(*model.heads(x), is_causal=True))


def require_equal(tree):
    for tokens, logits in zip(SEQUENCES, tree(SEQUENCES), strict=True):
        torch.testing.assert_close(logits, tree.unpacked(torch.tensor([tokens]))[0])


@pytest.mark.parametrize("are_shared", [False, True])
def test_first_calls_of_several_threads_are_exact(are_shared):
    trees = [tree_model(Tiny(attends), self_check=True) for _ in range(3)]
    errors = []

    def run(tree):
        try:
            require_equal(tree)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(trees[0 if are_shared else place],)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_check_waits_for_another_thread_before_it_changes_modes():
    tree = tree_model(Tiny(attends)).train()
    thread = threading.Thread(target=tree.check)
    with tree._making:
        thread.start()
        thread.join(0.5)
        assert all(module.training for module in tree.unpacked.modules())
    thread.join()
    assert all(module.training for module in tree.unpacked.modules())


@pytest.mark.parametrize(("owner", "name"), [(Tensor, "register_hook"), (nn.Module, "__setattr__"), (F, "dropout")])
def test_what_is_replaced_is_replaced_in_one_thread(owner, name):
    original, found = getattr(owner, name), []

    def look():
        # What stands in a module is the same for all threads, and asks for the thread when it is called.
        found.append(F.dropout(torch.ones(1), 0.0).item() if owner is F else getattr(owner, name))

    before = vars(owner)[name]
    with replaced(owner, name, lambda *_: None), replaced(owner, name, lambda *_: 3):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert getattr(owner, name)(None, "x", None) == 3
    assert found == [1.0 if owner is F else original]
    assert vars(owner)[name] is before


def test_what_torch_does_not_have_is_not_replaced():
    with pytest.raises(AttributeError, match="no_such_method"), replaced(Tensor, "no_such_method", print):
        pass


def test_replacements_of_two_threads_end_in_any_order():
    before, inside, leave = vars(Tensor)["register_hook"], threading.Event(), threading.Event()

    def other():
        with replaced(Tensor, "register_hook", lambda *_: 1):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with replaced(Tensor, "register_hook", lambda *_: 2):
        thread.start()
        inside.wait()
        assert torch.ones(1).register_hook() == 2
    leave.set()
    thread.join()
    assert vars(Tensor)["register_hook"] is before


def saved_and_loaded(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [lambda tree: pickle.loads(pickle.dumps(tree)), copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("was_called", [False, True])
def test_copy_is_a_tree_model_of_its_own(copied, was_called):
    tree = tree_model(Tiny(attends))
    if was_called:
        tree(SEQUENCES)
    own = copied(tree)
    require_equal(own)
    with torch.no_grad():
        own.unpacked.embed.weight.mul_(2)
    require_equal(own)
    require_equal(tree)
    assert own.embed is own.unpacked.embed
    assert own.embed is not tree.embed
