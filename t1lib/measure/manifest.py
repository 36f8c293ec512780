"""The machine and software of a run, the manifest of a finished one, and how its folder replaces the previous one.

Only a folder whose manifest.json is as it was written, and lists every file with its hash, counts as finished. The
manifest is written last, before the folder replaces the final one: a run killed at any time leaves the old or the new.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from t1lib import __version__, fingerprint, paths
from t1lib.errors import T1Error, require
from t1lib.files import read_signed, recover, replace, write_signed
from t1lib.memory import GIB

NAME = "manifest.json"
DRAWN = ("figures/", "tables/", "numbers.")  # files that can be made again from a run's samples


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


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
    """Raise `T1Error` if the profile is laptop or h200 and there is no GPU: a CPU would take days."""
    there = profile not in ("laptop", "h200") or bool(_gpu())
    require(there, f"profile {profile!r} is for a GPU, and there is no CUDA device here; allowed: smoke, auto")


def environment() -> dict[str, str | int | float]:
    """Machine and versions, without anything that identifies their owner (host, user, path); memory sizes in GiB. GPU
    entries only if there is a GPU."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text(encoding="utf-8", errors="replace") if listed.exists() else ""
    cpu = re.search(r"^model name\s*: (.+)", text, re.M)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False) or 0,
        "cores_logical": psutil.cpu_count() or 0,
        "ram_gib": round(psutil.virtual_memory().total / GIB, 1),
        "t1lib": __version__,
        "torch": torch.__version__,
        "triton": next((d.version for d in importlib.metadata.distributions(name="triton")), "not installed"),
        "transformers": importlib.metadata.version("transformers"),
        "cuda": torch.version.cuda or "none",
    } | _gpu()


def git_state() -> dict[str, str | bool]:
    """The commit, and whether any file outside outputs/, into which runs write, differs from it. Without git, they come
    from `T1_COMMIT` and `T1_DIRTY` (1 or 0), else are "unknown". Raises `T1Error` for a `T1_COMMIT` that is no full
    hash, or not git's."""
    git, given = ("git", "-C", str(paths.root())), os.environ.get("T1_COMMIT") or "unknown"
    whole = given == "unknown" or re.fullmatch("[0-9a-f]{40}", given) is not None
    require(whole, f"T1_COMMIT is {given!r}; allowed: a commit's 40 hexadecimal digits")
    own = _output(*git, "rev-parse", "HEAD:./")  # None for a copy that lies in another project's repository, too
    if own and (commit := _output(*git, "rev-parse", "HEAD")):
        require(given in ("unknown", commit), f"T1_COMMIT is {given}, and git says {commit}: unset it, or remove .git")
        shown = ("status", "--porcelain", "--untracked-files=normal")  # a setting may hide them
        changes = _output(*git, *shown, "--", ".", ":(exclude)outputs")
        return {"commit": commit, "dirty": "unknown" if changes is None else bool(changes)}
    return {"commit": given, "dirty": {"0": False, "1": True}.get(os.environ.get("T1_DIRTY", ""), "unknown")}


def entry(path: Path) -> dict[str, Any] | None:
    """A file's entry in a manifest, its sha256 and size in bytes; None if there is no such file."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Each file under `folder` except the manifest and hidden ones, with its sha256 and size in bytes."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): entry(path) for path in found if path != folder / NAME}


def _lasting(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without `measure`, which says nothing about a finished run."""
    return {name: value for name, value in parameters.items() if name != "measure"}


def write(folder: Path, *, parameters: Mapping[str, Any], seconds: float, **about: Any) -> None:
    """Write manifest.json for all of `folder`, the result of a run that took `seconds`. about: `experiment`, `profile`,
    `made_of`, and `git_state()` from when the run began"""
    content = {**about, "parameters": _lasting(parameters), "environment": environment()}
    started = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")
    content |= {"started": started, "seconds": round(seconds, 1), "drawn": fingerprint.drawing(about["made_of"])}
    write_signed(folder / NAME, content | {"files": files(folder)})


def change(folder: Path, **fields: Any) -> None:
    """Change fields of a manifest: `files`, or `report`, the PDF that was built from the run, and `report_of`, the
    files that it was built from."""
    write_signed(folder / NAME, (read(folder) or {}) | fields)


def read(folder: Path) -> dict[str, Any] | None:
    """A folder's manifest; None if there is none or it is not as it was written."""
    try:
        content = read_signed(folder / NAME)
    except T1Error:
        return None
    return content if isinstance(content.get("files"), dict) else None


def device(content: Mapping[str, Any]) -> str:
    """The name of the GPU that a run was measured on or, without one, of the CPU."""
    return content["environment"].get("gpu") or content["environment"]["cpu"]


def difference(folder: Path, experiment: str, parameters: Mapping[str, Any], drawn: bool = False) -> str | None:
    """Why `folder` is not the finished run of this notebook with these parameters by this code; None if it is. drawn:
    also if other code drew it, or from another docs/differences.md; to draw it again needs no measuring"""
    content = read(folder)
    if content is None:
        return damage(folder)
    if "executed.ipynb" not in content["files"]:
        return "not run by `python -m t1lib run`"
    now = fingerprint.everything()
    modules = content["made_of"].get("modules", {"t1lib": ""})  # none were noted by the first edition
    changed = [name for name, value in modules.items() if now.get(name) != value]
    changed[3:] = ["…"] * (len(changed) > 3)
    changed += ["notebook"] * (content["made_of"]["notebook"] != fingerprint.notebook(experiment))
    changed += ["parameters"] * (content["parameters"] != _lasting(parameters))
    if changed or (why := damage(folder, report=False)):
        return f"{', '.join(changed)} changed" if changed else why
    other = drawn and content.get("drawn") != fingerprint.drawing(content["made_of"])
    return "drawn by other code, or from another docs/differences.md" if other else None


def damage(folder: Path, report: bool = True) -> str | None:
    """The first file found that has changed since the run, in words; "missing" without a run, None if all are intact.
    report: check the PDF built from the run, too, which can be built again without measuring"""
    content = read(folder)
    if content is None:
        return f"{NAME} is not as the run left it" if (folder / NAME).exists() else "missing"
    pdf = {f"../{folder.name}.pdf": content["report"]} if report and "report" in content else {}
    changed = (name for name, had in (content["files"] | pdf).items() if entry(folder / name) != had)
    return next((f"{name} is not as the run left it" for name in changed), None)


def other_pdf(folder: Path) -> str | None:
    """Why the PDF beside a run is not what would be built now, in words; None if it is, or if there is none."""
    content, pdf = read(folder) or {}, folder.with_name(f"{folder.name}.pdf")
    if not pdf.is_file():
        return None
    if entry(pdf) != content.get("report"):
        return f"{pdf.name} was not built from this run"
    changed = (name for name, had in content.get("report_of", {}).items() if entry(paths.root() / name) != had)
    return next((f"{pdf.name} was built from another {name}" for name in changed), None)


def require_finished(folder: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a finished run that had these parameters, with its samples as they were. Raises `T1Error` if
    `folder` holds none."""
    content, shown = read(folder), paths.shown(folder)
    if content is None:
        raise T1Error(f"{shown} holds no finished run to draw from; `python -m t1lib run` makes one")
    whole = entry(folder / "samples.csv") == content["files"].get("samples.csv", {})
    require(whole, f"{shown}/samples.csv is not the one that the run was finished with")
    for name, had in content["parameters"].items():
        now = parameters.get(name, had)
        require(now == had, f"{shown} was run with {name}={had!r}; {name}={now!r} has to be measured")
    return content


def replace_drawn(fresh: Path, folder: Path, made_of: Mapping[str, Any]) -> list[str]:
    """Replace a run's figures, tables and numbers by those in `fresh`, in its manifest too; returns their names. Other
    files keep their recorded hashes, so manual edits are still noticed. A PDF built before is no longer the run's.
    made_of: the code that drew them; modules that the run did not load do not count"""
    content = read(folder) or {}
    for part in ("figures", "tables"):
        shutil.rmtree(folder / part, ignore_errors=True)
    written = {name: made for name, made in files(fresh).items() if name.startswith(DRAWN)}
    for name in written:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(fresh / name, folder / name)
    kept = {name: made for name, made in content["files"].items() if not name.startswith(DRAWN)}
    for name in ("report", "report_of"):
        content.pop(name, None)
    modules = {name: made_of["modules"].get(name) for name in content["made_of"].get("modules", ())}
    content["drawn"] = fingerprint.drawing({**made_of, "modules": modules})
    write_signed(folder / NAME, content | {"files": dict(sorted((kept | written).items()))})
    return list(written)


def require_replaceable(final: Path) -> None:
    """Raise `T1Error` if `final` was measured on another kind of GPU: only the same kind may replace it."""
    content = read(final)
    if content is not None and "gpu" in content["environment"]:
        here = device({"environment": environment()})
        told = f"{paths.shown(final)} was measured on {device(content)}, and this is {here}"
        allowed = "allowed: another profile (copy its folder in params/), or that folder moved away"
        require(device(content) == here, f"{told}; {allowed}")


def publish(staging: Path, final: Path) -> None:
    """Replace `final` by the complete `staging` folder beside it. Raises `T1Error` if another GPU measured what `final`
    holds, or if a file there is held open (Windows)."""
    recover(final)
    require_replaceable(final)
    try:
        replace(staging, final)
    except OSError as error:
        raise T1Error(f"cannot replace {paths.shown(final)} ({error.strerror}); is a file there open?") from None
