"""Every error that tree_compile raises: one class per mistake, each saying where, why and what to try."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BidirectionalAttentionError",
    "CaptureError",
    "ControlFlowError",
    "DropoutError",
    "EmptySequenceError",
    "InputError",
    "KernelError",
    "LengthDependentError",
    "LostGradientError",
    "OutputError",
    "PayloadError",
    "PlanError",
    "RefusedModelError",
    "ReplayError",
    "SelfCheckError",
    "SequenceTooLongError",
    "SourceLine",
    "StaleOutputError",
    "StatefulModelError",
    "TokenMixingError",
    "TokenRangeError",
    "TokenTypeError",
    "TreeCompileError",
    "UnknownOpError",
    "UnsupportedArgumentError",
    "UnsupportedOutputError",
    "WrappedModelError",
]


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's model.

    Attributes:
        file: path of the Python file.
        line: line number, from 1.
        code: the text of the line, stripped.
    """

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class TreeCompileError(Exception):
    """Base of all errors of this package.

    Args:
        what: one sentence that says what was found.
        where: the line of the user's model that it was found on, if there is one.
        why: why this cannot be computed on a prefix tree.
        hint: what the user can try.
    """

    def __init__(self, what: str, *, where: SourceLine | None = None, why: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  at {self.where}")
            if self.where.code:
                lines.append(f"      {self.where.code}")
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


class InputError(TreeCompileError, ValueError):
    """The sequences of a call are not usable."""


class EmptySequenceError(InputError):
    """A sequence has no tokens, or the list has no sequences."""


class SequenceTooLongError(InputError):
    """A sequence does not fit in `row_tokens`, or is longer than the model or its proof allows."""


class TokenRangeError(InputError):
    """A token id is negative or not below the size of the model's vocabulary."""


class TokenTypeError(InputError):
    """Tokens are not integers, or not one-dimensional."""


class PayloadError(InputError):
    """Per-token inputs are not aligned with their sequences."""


class PlanError(InputError):
    """A plan is without its sequences, is given others, or was not read from a plan's file."""


class RefusedModelError(TreeCompileError):
    """The model cannot be proved exact on a prefix tree."""


class CaptureError(RefusedModelError):
    """The model cannot be captured: torch.export fails, or its parameters have no values yet."""


class LostGradientError(CaptureError):
    """The model changes gradients in a way that a captured graph does not keep."""


class StatefulModelError(RefusedModelError):
    """A call of the model changes what its next call computes, or computes something that a graph does not keep."""


class ControlFlowError(RefusedModelError):
    """The model's Python code needs one number of tokens, or the values of tensors."""


class BidirectionalAttentionError(RefusedModelError):
    """A token sees tokens after it."""


class TokenMixingError(RefusedModelError):
    """An operation mixes tokens in a way that no rule covers."""


class UnknownOpError(RefusedModelError):
    """An operation that the token-axis proof has no rule for."""


class LengthDependentError(RefusedModelError):
    """A value at one token changes with the number of tokens after it."""


class DropoutError(RefusedModelError):
    """Attention dropout is active."""


class KernelError(RefusedModelError):
    """Kernels were asked for that cannot compute the model's attention."""


class UnsupportedOutputError(RefusedModelError):
    """The model returns something that is neither a tensor nor a plain constant."""


class ReplayError(RefusedModelError):
    """Recorded experts cannot take the place of what the model's routers choose."""


class UnsupportedArgumentError(TreeCompileError, TypeError):
    """An argument of the call or of `forward_kwargs` has no meaning on a list of sequences."""


class WrappedModelError(TreeCompileError, TypeError):
    """The model is wrapped by DDP, FSDP or torch.compile, is a tree model already, or has distributed parameters."""


class SelfCheckError(TreeCompileError, RuntimeError):
    """The rewritten graph and the unpacked model differ on a small random tree."""


class StaleOutputError(TreeCompileError, RuntimeError):
    """Something is asked of an output whose model has been changed since."""


class OutputError(TreeCompileError, AttributeError):
    """The model's output does not have what is asked of it, so that `hasattr(out, "hidden")` is False."""
