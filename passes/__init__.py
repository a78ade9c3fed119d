"""Graph to graph: one file for each thing that is found in a captured graph, and the analysis that they share."""

if __name__ != "tree_compile.passes":
    raise ImportError("this folder is imported as tree_compile.passes, not as passes", name=__name__)
