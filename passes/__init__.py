"""Graph to graph: one file for each thing that is found in a captured graph, and the analysis that they share."""

if __name__ != "tree_compile.passes":
    raise ImportError(f"import this package as tree_compile.passes, not as {__name__}")

# Rules of the token-axis proof register themselves, before anybody else adds or replaces one.
from tree_compile.passes import rules_of_layout, rules_of_products, rules_of_rows  # noqa: F401
