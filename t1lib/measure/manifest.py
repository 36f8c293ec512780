"""The manifest of a finished run, and how a run's staging folder replaces the previous one.

Only a folder whose manifest.json lists every file with its correct hash counts as finished. The
manifest is written last, into the staging folder, which then replaces the final folder by a
rename: a run killed at any moment leaves either the old folder or the new one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import t1lib
from t1lib import params, paths
from t1lib.errors import T1Error, require
from t1lib.files import write_json
from t1lib.measure.environment import device_name, environment, git_state

NAME = "manifest.json"
INPUTS = "inputs.json"  # exists during a run: name → sha256 of what it read besides its parameters


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_json(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())


def ingredients(experiment: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run's results depend on: notebook, parameters and t1lib as sha256, torch and device by name."""
    import torch

    cells = params.read_notebook(paths.notebook(experiment))["cells"]
    package = Path(t1lib.__file__).parent
    # Line endings differ between checkouts on Windows and elsewhere; the sources do not.
    sources = {
        path.relative_to(package).as_posix(): _digest(path.read_bytes().replace(b"\r\n", b"\n"))
        for path in sorted(package.rglob("*.py"))
    }
    return {
        "notebook": _digest_json([[cell["cell_type"], params.source(cell)] for cell in cells]),
        "parameters": _digest_json(dict(parameters)),
        "t1lib": _digest_json(sources),
        "torch": torch.__version__,
        "device": device_name(),
    }


def fingerprint(experiment: str, parameters: Mapping[str, Any]) -> str:
    """Return the sha256 over the `ingredients` of a run; a run with the same fingerprint need not be repeated."""
    return fingerprint_of(ingredients(experiment, parameters))


def fingerprint_of(made_of: Mapping[str, str]) -> str:
    """Return the sha256 over `ingredients` that were taken earlier."""
    return _digest_json(dict(made_of))


def utc_now() -> str:
    """Return the time in UTC as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each file under `folder` except the manifest and hidden ones, with its sha256 and size in bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != NAME and not path.name.startswith("."):
            data = path.read_bytes()
            found[name] = {"sha256": _digest(data), "bytes": len(data)}
    return found


def _take_inputs(folder: Path) -> dict[str, str]:
    path = folder / INPUTS
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.unlink(missing_ok=True)
    return found


def write(
    folder: Path,
    *,
    experiment: str,
    profile: str,
    parameters: Mapping[str, Any],
    made_of: Mapping[str, str],
    started: str,
    seconds: float,
) -> None:
    """Write manifest.json for everything in `folder`.

    `made_of` are the `ingredients` as they were when the run began, so that an edit made during
    the run makes it stale; `started` is the start time in UTC, ISO 8601.
    """
    content = {
        "experiment": experiment,
        "profile": profile,
        "parameters": dict(parameters),
        "fingerprint": fingerprint_of(made_of),
        "made_of": dict(made_of),
        "inputs": _take_inputs(folder),
        **git_state(),
        "environment": environment(),
        "started": started,
        "seconds": round(seconds, 1),
        "files": _files(folder),
    }
    write_json(folder / NAME, content)


def read(folder: Path) -> dict[str, Any] | None:
    """Return a folder's manifest, or None when there is none or it does not parse."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("files"), dict) else None


def difference(folder: Path, wanted: str, made_of: Mapping[str, str] | None = None) -> str | None:
    """Return a short reason why `folder` is not the finished run with the fingerprint `wanted`, or None if it is.

    `made_of`, the ingredients of `wanted`, allows the reason to name those that changed.
    """
    content = read(folder)
    if content is None:
        return "missing"
    if "executed.ipynb" not in content["files"]:
        return "not run by `python -m t1lib run`"
    if content.get("fingerprint") != wanted:
        before = content.get("made_of", {})
        other = [name for name, value in (made_of or {}).items() if before.get(name) != value]
        return f"{', '.join(other) or 'something it was made of'} changed"
    for name in content["files"]:
        if changed(folder, name):
            return f"{name} is not as the run left it"
    return None


def changed(folder: Path, name: str) -> bool:
    """Return whether a file differs from the one that the folder's manifest lists, is missing, or is not listed."""
    listed = (read(folder) or {"files": {}})["files"].get(name, {})
    path = folder / name
    return not path.is_file() or _digest(path.read_bytes()) != listed.get("sha256")


def matches(folder: Path, wanted: str) -> bool:
    """Return whether `folder` is the finished, unmodified run with the fingerprint `wanted`."""
    return difference(folder, wanted) is None


def refresh(folder: Path, names: Iterable[str]) -> None:
    """Update the manifest for redrawn files, those whose names start with one of `names`; keep everything else.

    A file that was not redrawn keeps its old hash, so that a manual edit of it is still detected.
    """
    content = read(folder)
    if content is None:
        raise T1Error(f"{paths.shown(folder)} holds no finished run: its {NAME} is missing or broken")
    redrawn = tuple(names)
    kept = {name: entry for name, entry in content["files"].items() if not name.startswith(redrawn)}
    kept |= {name: entry for name, entry in _files(folder).items() if name.startswith(redrawn)}
    write_json(folder / NAME, {**content, "files": dict(sorted(kept.items()))})


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def recover(final: Path) -> None:
    """Finish or undo the swap of a run that was killed while publishing to `final`."""
    old = _aside(final)
    if old.exists() and not final.exists():
        os.replace(old, final)
    shutil.rmtree(old, ignore_errors=True)


def publish(staging: Path, final: Path) -> None:
    """Replace `final` by the complete `staging` folder.

    Raises `T1Error` if `staging` holds no manifest yet, or if a file of the old folder is held open (Windows).
    """
    require((staging / NAME).is_file(), f"{paths.shown(staging)} is not complete: it holds no {NAME}")
    recover(final)
    try:
        if final.exists():
            os.replace(final, _aside(final))
        os.replace(staging, final)
    except OSError as error:
        recover(final)
        raise T1Error(f"cannot replace {paths.shown(final)} ({error.strerror}); is a file there open?") from None
    shutil.rmtree(_aside(final), ignore_errors=True)
