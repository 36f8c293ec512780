"""A mend of Triton's interpreter, which runs the kernels in tests without a GPU."""

import os


def mend() -> None:
    """Where it is on: let it take `block & scalar` of two comparisons as a mask. A comparison of integers is kept as an
    integer, which becomes wide when it is broadcast, and Triton 3.9 refuses masks that are not boolean."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    broadcast = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, kind: tl.block_type, value: TensorHandle) -> TensorHandle:
        return broadcast(self, kind, TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value)

    InterpreterBuilder.create_splat = create_splat
