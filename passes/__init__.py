"""Graph to graph: one file for each thing that is found in a captured graph, and the analysis that they share."""

if __name__ != "tree_compile.passes":
    raise ImportError(f"import this package as tree_compile.passes, not as {__name__}")
