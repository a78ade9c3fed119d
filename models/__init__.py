"""Small ordinary decoder models, written for one unpacked sequence."""

if __name__ != "tree_compile.models":
    raise ImportError("this folder is imported as tree_compile.models, not as models", name=__name__)
