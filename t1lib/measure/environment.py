"""The machine and software of a run, without anything that identifies its owner (host, user, path)."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch

from t1lib import __version__, paths
from t1lib.errors import require
from t1lib.memory import GIB


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    listed = Path("/proc/cpuinfo")
    text = listed.read_text(encoding="utf-8", errors="replace") if listed.exists() else ""
    named = re.search(r"^model name\s*: (.+)", text, re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


@functools.cache
def _gpu() -> dict[str, str | float]:
    """Name, memory (GiB) and driver of the first visible GPU; empty without CUDA. nvidia-smi is asked first, because
    torch would create a CUDA context: the process that drives the runs would hold GPU memory in every measurement."""
    if not torch.cuda.is_available():
        return {}
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = "--query-gpu=name,memory.total,driver_version"
    answer = _output("nvidia-smi", "-i", device, query, "--format=csv,noheader,nounits") or ""
    try:
        name, mebibytes, driver = (field.strip() for field in answer.split(","))
        gib = float(mebibytes) / 1024
    except ValueError:
        properties, driver = torch.cuda.get_device_properties(0), "unknown"
        name, gib = properties.name, properties.total_memory / GIB
    return {"gpu": name, "gpu_memory_gib": round(gib, 1), "driver": driver}


def default_profile() -> str:
    """The profile for this machine: smoke without CUDA, h200 with at least 70 GiB of GPU memory, else laptop."""
    if not (gpu := _gpu()):
        return "smoke"
    return "h200" if float(gpu["gpu_memory_gib"]) >= 70 else "laptop"  # cards of 80 GB report a few GiB less


def require_gpu(profile: str) -> None:
    """Raise `T1Error` if the profile is for a GPU and there is none: a CPU would take days."""
    there = profile not in ("laptop", "h200") or bool(_gpu())
    require(there, f"profile {profile!r} is for a GPU, and there is no CUDA device here; allowed: smoke, auto")


def environment() -> dict[str, str | int | float]:
    """Machine and versions as a flat dict; memory sizes in GiB. GPU entries only if there is a GPU."""
    triton = {found.version for found in importlib.metadata.distributions(name="triton")}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores_physical": psutil.cpu_count(logical=False) or 0,
        "cores_logical": psutil.cpu_count() or 0,
        "ram_gib": round(psutil.virtual_memory().total / GIB, 1),
        "t1lib": __version__,
        "torch": torch.__version__,
        "triton": next(iter(triton), "not installed"),
        "transformers": importlib.metadata.version("transformers"),
        "cuda": torch.version.cuda or "none",
    } | _gpu()


def git_state() -> dict[str, str | bool]:
    """The commit, and whether any file outside outputs/, into which runs write, differs from it.

    Without git, the values come from `T1_COMMIT` and `T1_DIRTY` (1 or 0); a value that is not given is "unknown".
    Raises `T1Error` for a `T1_COMMIT` that is not a full commit hash.
    """
    git, given = ("git", "-C", str(paths.root())), os.environ.get("T1_COMMIT") or "unknown"
    whole = given == "unknown" or re.fullmatch("[0-9a-f]{40}", given) is not None
    require(whole, f"T1_COMMIT is {given!r}; allowed: a commit's 40 hexadecimal digits")
    if commit := _output(*git, "rev-parse", "HEAD"):
        require(given in ("unknown", commit), f"T1_COMMIT is {given}, and git says {commit}: unset it, or remove .git")
        changes = _output(*git, "status", "--porcelain", "--", ".", ":(exclude)outputs")
        return {"commit": commit, "dirty": "unknown" if changes is None else bool(changes)}
    return {"commit": given, "dirty": {"0": False, "1": True}.get(os.environ.get("T1_DIRTY", ""), "unknown")}
