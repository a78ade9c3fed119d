"""`python -m tree_compile` is the command line `treecompile`."""

from tree_compile.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
