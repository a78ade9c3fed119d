"""Compiles the kernels of sparse index attention for sm_90a: python sparse_sources.py heads width value_width dtype.

Prints one JSON object: for forward and backward the CUDA source, and the bytes of shared memory of one block; with
--assemble, whether nvcc assembled it.
"""

import json
import sys

import tilelang
from tilelang import tvm
from tilelang.engine.lower import lower

from tree_compile.runtime.sparse_kernels import TARGET
from tree_compile.runtime.sparse_programs import backward_program, forward_program
from tree_compile.runtime.sparse_shapes import backward_shape, forward_shape


def lowered(program):
    target = tvm.target.Target(TARGET)
    with target:
        artifact = lower(program, target=target, enable_device_compile=False)
    ((_, function),) = artifact.device_mod.functions_items()
    return {"source": artifact.kernel_source, "shared_bytes": int(function.attrs["dyn_shared_memory_buf"])}


def is_assembled(program):
    tilelang.compile(program, target=TARGET, execution_backend="tvm_ffi")
    return True


def main():
    tilelang.disable_cache()
    heads, width, value_width, dtype, *options = sys.argv[1:]
    shape = (int(heads), int(width), int(value_width), dtype)
    programs = {"forward": forward_program(forward_shape(*shape)), "backward": backward_program(backward_shape(*shape))}
    compiled = is_assembled if options == ["--assemble"] else lowered
    print(json.dumps({name: compiled(program) for name, program in programs.items()}))


if __name__ == "__main__":
    main()
