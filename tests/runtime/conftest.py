"""What the tests of this folder share."""

from hypothesis import settings

# How long an example takes says nothing: the first one may import torch, and cores may be busy.
settings.register_profile("tree_compile", deadline=None)
settings.load_profile("tree_compile")
