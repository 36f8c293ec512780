"""Kernels that run on Hopper alone: Triton can compile them without a GPU. Gluon's names change between its versions,
and some that are gone fail only when a kernel is compiled."""

import pytest

pytest.importorskip("triton")
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from t1lib.heads import fused_launch, fused_plan, fused_run, fused_tail
from t1lib.heads.options import Settings, Tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests run them")


class Driver:
    """What Triton asks of a GPU's driver when it compiles."""

    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The arguments' names of kernels by name: a launch on tensors of a CPU adds its own, once compiled for Hopper."""
    found, run = {}, JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **given):
        run(kernel, *args, grid=grid, warmup=True, **given)
        found[f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}"] = kernel.arg_names

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fused_plan, "device_of", lambda _: fused_plan.Device("hopper", 132))
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # no kernel fills it
    return found


def operands() -> fused_plan.Operands:
    e, w, target = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((256, 64), (2048, 64), (256,)))
    given = fused_plan.Packed(Settings(), None, "-", needs=(True, True, False), early=True, tail=False)
    return fused_plan.Operands(Tensors(e, w, target.long()), given, check=False)


def test_the_kernels_in_gluon(compiled):
    assert fused_launch.hopper is not None
    done = fused_run.early(operands())
    assert {"hopper.logits", "products.products"} < compiled.keys() and "logits.logits" not in compiled
    arguments = {name for names in compiled.values() for name in names}
    others = {name for name in vars(done) if not name.startswith("_") and not name.endswith("_stride")} - arguments
    assert others == {"o", "opts", "plan", "tiles", "tma", "fields"}  # as `Pass` says


@pytest.mark.slow
def test_those_with_fp8(compiled):
    fused_tail.early(operands())
    assert {"hopper.logits", "tail.products", "tail.narrow_weight", "tail.narrow_hidden"} < compiled.keys()
