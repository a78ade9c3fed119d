"""Runs a script on a machine that pretends a GPU: python with_gpu.py LIBRARY SCRIPT ARGUMENTS.

The library is built from `pretended_gpu.cpp`. torch looks for devices when it is loaded, and its compiler when that is.
"""

import ctypes
import importlib
import runpy
import sys

_, library, script, *arguments = sys.argv
ctypes.CDLL(library)
sys.argv = [script, *arguments]
importlib.import_module("pretended_gpu").pretend_gpu()
runpy.run_path(script, run_name="__main__")
