"""Small ordinary decoder models, written for one unpacked sequence."""

if __name__ != "tree_compile.models":
    raise ImportError(f"import this package as tree_compile.models, not as {__name__}")
