"""Computes a TileLang program on the CPU, from the same intermediate form that TileLang compiles for a GPU.

Every operation on a tile, and every parallel loop, is one operation of torch. Numbers are rounded to the dtype of each
buffer that they are stored in. What lies between a tile and a GPU's threads is not computed here: layouts, pipelines,
barriers, and the order of atomic additions.

A parallel loop may read row -1 of a tensor of the caller and gets 0, as TileLang's guards give; every other read and
every write must stay inside.
"""

import operator

import torch
from tilelang import tvm

DTYPES = {"int32": torch.int32, "bool": torch.bool} | {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")
}
BINARY = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "GE": operator.ge, "GT": operator.gt,
}  # fmt: skip
ACCUMULATE, OVERWRITE = False, True


def run_program(program, *arguments):
    """Calls a program with tensors and numbers; those that it writes are changed in place."""
    Interpreter(program, arguments).run(program.body)


class Interpreter:
    def __init__(self, program, arguments):
        self.values, self.buffers = {}, {}
        for parameter, argument in zip(program.params, arguments, strict=True):
            if parameter not in program.buffer_map:
                self.values[parameter] = torch.tensor(argument)
                continue
            buffer = program.buffer_map[parameter]
            assert argument.dtype == DTYPES[str(buffer.dtype)], buffer.name
            self.buffers[buffer] = argument
            for size, expected in zip(argument.shape, buffer.shape, strict=True):
                known = self.values.setdefault(expected, torch.tensor(size)) if is_a(expected, "Var") else int(expected)
                assert size == known, buffer.name

    # Statements. `mask` says for which elements of the parallel loops around a statement it is computed.

    def run(self, statement, mask=True):
        getattr(self, "run_" + type(statement).__name__)(statement, mask)

    def run_SeqStmt(self, statement, mask):
        for part in statement.seq:
            self.run(part, mask)

    def run_SBlockRealize(self, statement, mask):
        for buffer in statement.block.alloc_buffers:
            dtype = DTYPES[str(buffer.dtype)]
            # What is read before it is written has to show.
            fill = float("nan") if dtype.is_floating_point else 2**30
            self.buffers[buffer] = torch.full([int(size) for size in buffer.shape], fill, dtype=dtype)
        self.run(statement.block.body, mask)

    def run_Bind(self, statement, mask):
        self.values[statement.var] = self.value(statement.value, mask)

    def run_For(self, statement, mask):
        if statement.kind == tvm.tirx.ForKind.PARALLEL:
            self.run_parallel(statement)
            return
        for number in range(int(self.value(statement.extent, True))):
            self.values[statement.loop_var] = torch.tensor(number)
            self.run(statement.body, mask)

    def run_parallel(self, statement):
        variables, extents = [], []
        while is_a(statement, "For"):
            variables.append(statement.loop_var)
            extents.append(int(statement.extent))
            statement = statement.body
        places = torch.meshgrid(*map(torch.arange, extents), indexing="ij")
        self.values.update(zip(variables, places, strict=True))
        self.run(statement, torch.ones(extents, dtype=torch.bool))

    def run_IfThenElse(self, statement, mask):
        assert statement.else_case is None
        self.run(statement.then_case, mask & self.value(statement.condition, mask))

    def run_BufferStore(self, statement, mask):
        target = self.buffers[statement.buffer]
        places = self.written_places(target, statement.indices, mask)
        value = self.value(statement.value, mask).broadcast_to(mask.shape)[mask]
        target[places] = value.to(target.dtype)

    def run_Evaluate(self, statement, mask):
        call = statement.value
        if is_a(call, "Call"):
            getattr(self, "call_" + call.op.name.rpartition(".")[2])(call, mask)

    def written_places(self, target, indices, mask):
        places = [self.value(index, mask).broadcast_to(mask.shape)[mask] for index in indices]
        for place, size in zip(places, target.shape, strict=True):
            assert ((place >= 0) & (place < size)).all(), "a write outside of a tensor"
        return tuple(place.long() for place in places)

    # Operations on tiles.

    def tile(self, region):
        """The part of a tensor that `T.region(buffer[first, …], access, extents…)` says."""
        load, sizes = region.args[0], [int(size) for size in region.args[2:]]
        tensor = self.buffers[load.buffer]
        for axis, (index, size) in enumerate(zip(load.indices, sizes, strict=True)):
            first = int(self.value(index, True))
            assert first >= 0
            assert first + size <= tensor.shape[axis], load.buffer.name
            tensor = tensor.narrow(axis, first, size)
        return tensor

    def call_copy(self, call, mask):
        source, target = map(self.tile, call.args)
        target.copy_(source.reshape(target.shape))

    def call_fill(self, call, mask):
        self.tile(call.args[0]).fill_(self.value(call.args[1], True))

    def call_gemm(self, call, mask):
        left, right, target = map(self.tile, call.args[:3])
        left, right = (
            (tile.T if bool(is_transposed) else tile).float()
            for tile, is_transposed in zip((left, right), call.args[3:5], strict=True)
        )
        before = 0 if bool(call.args[9]) else target
        target.copy_(before + left @ right)

    def call_reduce(self, call, mask):
        source, target = map(self.tile, call.args[:2])
        kind, axis, overwrites = call.args[2].value, int(call.args[3]), bool(call.args[4])
        reduced = source.amax(axis) if kind == "max" else source.sum(axis)
        if not overwrites:
            reduced = torch.maximum(target, reduced) if kind == "max" else target + reduced
        target.copy_(reduced)

    def call_atomic_add_elem_op(self, call, mask):
        load = call.args[0].args[0]
        target = self.buffers[load.buffer]
        places = self.written_places(target, load.indices, mask)
        target.index_put_(places, self.value(call.args[1], mask).broadcast_to(mask.shape)[mask], accumulate=True)

    # Expressions.

    def value(self, expression, mask):
        kind = type(expression).__name__
        if kind == "Var":
            return self.values[expression]
        if kind in ("IntImm", "FloatImm"):
            return torch.tensor(expression.value, dtype=DTYPES[str(expression.dtype)])
        if kind == "Cast":
            return self.value(expression.value, mask).to(DTYPES[str(expression.dtype)])
        if kind in BINARY:
            return BINARY[kind](self.value(expression.a, mask), self.value(expression.b, mask))
        return getattr(self, "value_of_" + kind)(expression, mask)

    def value_of_BufferLoad(self, load, mask):
        tensor = self.buffers[load.buffer]
        indices = torch.broadcast_tensors(*(self.value(index, mask) for index in load.indices))
        first = -1 if load.buffer.scope() == "global" else 0
        for index, size in zip(indices, tensor.shape, strict=True):
            assert ((index >= first) & (index < size)).all(), "a read outside of a tensor"
        is_guarded = torch.stack([index < 0 for index in indices]).any(0)
        read = tensor[tuple(index.clamp(min=0).long() for index in indices)]
        return torch.where(is_guarded, 0, read)

    def value_of_Call(self, call, mask):
        name = call.op.name.rpartition(".")[2]
        if name == "if_then_else":
            condition = self.value(call.args[0], mask)
            return torch.where(condition, self.value(call.args[1], mask), self.value(call.args[2], mask))
        if name == "launch_thread_idx":
            return None
        if name == "infinity":
            return torch.tensor(float("inf"))
        return {"exp2": torch.exp2, "log2": torch.log2}[name](self.value(call.args[0], mask))


def is_a(node, kind):
    return isinstance(node, getattr(tvm.tirx, kind))
