"""A long row needs no tensor of T x T numbers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref

from tree_compile import treecompile
from tree_compile.models.dense import Dense, DenseConfig

TOKENS = 32_768

STEP = """
import resource
import torch
from tree_compile import treecompile
from tree_compile.tiny import tiny_model

torch.set_num_threads(1)
model = tiny_model('mistral', num_hidden_layers=1, vocab_size=64, max_position_embeddings=8192)
tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
generator = torch.Generator().manual_seed(0)
trunk = torch.randint(3, 60, (4_096,), generator=generator)
sequences = [torch.cat([trunk, torch.randint(3, 60, (1_024,), generator=generator)]) for _ in range(28)]
assert tree_model.plan(sequences).packed_tokens > {tokens} * 0.99, tree_model.plan(sequences).packed_tokens
tree_model([[1, 2, 3], [1, 2, 4]]).logits[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = tree_model(sequences)
sum(part.sum() for part in out.logits).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_step_on_a_row_of_32768_tokens_stays_far_below_one_byte_per_pair() -> None:
    """With a window; for attention without one see runtime/test_attention_op.py."""
    code = textwrap.dedent(STEP).format(tokens=TOKENS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stdout)
    assert kilobytes * 1024 < 0.4 * TOKENS * TOKENS


def test_models_that_were_dropped_are_freed_when_the_next_large_one_is_captured() -> None:
    dropped = []
    for _ in range(4):
        model = Dense(DenseConfig(vocab_size=1 << 16, width=128, layers=1))
        treecompile(model, backend="eager")([[1, 2, 3]])
        dropped.append(weakref.ref(model))
        assert sum(found() is not None for found in dropped) <= 2
