"""From sequences to rows, the ops that rewritten graphs call, and back from rows to sequences."""

if __name__ != "tree_compile.runtime":
    raise ImportError(f"import this package as tree_compile.runtime, not as {__name__}")
