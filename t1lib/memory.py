"""Sizes in words, pinned host memory, how much of the host's memory is free, whether an error means too little, and how
much memory some code holds."""

import ctypes
import os
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
SMALL = 2**20
# In messages of the host's allocator, CUDA's runtime, Triton and cuBLAS: their errors have no type of their own.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
CONTROL_GROUP = Path("/sys/fs/cgroup")
_registered: dict[int, int] = {}


def in_words(nbytes: float) -> str:
    """A size as text, such as "1.5 GiB" or "64 MiB"."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device or host memory ran out."""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def grow_segments() -> None:
    """Make PyTorch's CUDA allocator use expandable segments, which fragment less with blocks of many sizes. Call it
    before the first allocation; a setting in the environment takes precedence. Linux only."""
    said = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys()
    if sys.platform == "linux" and not said:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def pinned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat host tensor of zeros that `device` can copy from and to asynchronously; plain memory for a CPU. Ordinary
    memory is registered with CUDA, for as long as the storage lives, because PyTorch's pinned allocator rounds up to a
    power of two; small tensors, which would share pages, come from that allocator. If the system refuses, the memory
    stays pageable, with a warning: copies are correct but slower."""
    cuda, nbytes = device.type == "cuda", numel * dtype.itemsize
    if not cuda or nbytes < SMALL:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=cuda and numel > 0)
    # `zero_` touches the pages on all cores; `torch.zeros` would leave that to the registration, which uses only one.
    buffer = torch.empty(numel, dtype=dtype, device="cpu").zero_()
    pointer = buffer.data_ptr()
    code = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if code == 0:
        _registered[pointer] = nbytes
        weakref.finalize(buffer.untyped_storage(), _unregister, pointer)
    else:
        refused = f"the system refused to pin memory (CUDA error {code}; see `ulimit -l`)"
        warnings.warn(f"{refused}: copies to and from it make the host wait", stacklevel=2)
    return buffer


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of the tensors made in it that are alive: `now`, and at most, `peak`; and of the
    `largest` one. On any device, without regard to how an allocator rounds, and without those within compiled code."""

    supports_higher_order_operators = True  # such as FlexAttention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo would never compile a function that runs in here first

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref] = {}  # storages that are alive, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._note((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, made=True)
        return out

    def _note(self, values: Any, made: bool) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:  # sparse ones have no storage
                storage = value.untyped_storage()
                if storage._cdata not in self._known:
                    nbytes = storage.nbytes() * made
                    forget = partial(self._forget, storage._cdata, nbytes)
                    self._known[storage._cdata] = weakref.ref(storage, forget)
                    self.now += nbytes
                    self.largest = max(self.largest, nbytes)
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, nbytes: int, _: Any) -> None:
        del self._known[key]
        self.now -= nbytes


def host_available() -> int:
    """Bytes of memory that this process may still take, within the limits of the machine and of its control group."""
    free = psutil.virtual_memory().available
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        group = CONTROL_GROUP if most == "memory.max" else CONTROL_GROUP / "memory"  # cgroup versions 2 and 1
        try:
            free = min(free, int((group / most).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return max(free, 0)


def trim_heap() -> None:
    """Make the C library return freed memory to the system: glibc may keep gigabytes after a model's tensors have moved
    elsewhere. Other C libraries have no such call."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def _unregister(pointer: int) -> None:
    _registered.pop(pointer, None)
    torch.cuda.cudart().cudaHostUnregister(pointer)
