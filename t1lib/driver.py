"""The commands `run`, `list` and `report`: notebooks are run headless by papermill, and published once finished."""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import papermill
import psutil
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from t1lib import claims, fingerprint, params, paths
from t1lib.errors import T1Error, UnavailableError, choose, require
from t1lib.files import locked, recover, remove, writing
from t1lib.measure import manifest
from t1lib.signals import EXIT_INTERRUPTED


def plan(names: Sequence[str], profile: str, overrides: Mapping[str, Any]) -> tuple[str, dict[str, params.Values]]:
    """The profile's name, and the parameters of each experiment in `names` (of all, if it is empty or has "all"), with
    overrides where declared. Raises `T1Error` as `params.resolve`, and for an output folder that cannot be made."""
    known = params.experiments()
    require(bool(known), "no experiments: notebooks/ holds no notebook with parameters")
    chosen = known if not names or "all" in names else [choose("experiment", name, known) for name in names]
    profile = overrides.get("profile", manifest.default_profile()) if profile == "auto" else profile
    choose("profile", profile, [*params.profiles(), "auto"])
    resolved = {}
    for name in chosen:
        own = {key: value for key, value in overrides.items() if key in params.declared(name)}
        resolved[name] = params.resolve(name, profile, own)
        _require_distinct_cells(name)
    for name in overrides:
        choose("parameter", name, dict.fromkeys(key for values in resolved.values() for key in values))
    measured = all(values.get("measure", True) for values in resolved.values())
    require(measured, "-p: `measure` is False, and `run` measures; `python -m t1lib report` draws finished runs again")
    folder = paths.root() / "outputs" / profile
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return profile, resolved


def _require_distinct_cells(experiment: str) -> None:
    """Raise `T1Error` if two cells are the same. Run headless, cells have no ids: the second would replace what the
    first one made."""
    path, seen = paths.notebook(experiment), set()
    for source in filter(str.strip, (cell["source"] for cell in params.code_cells(path))):
        twice = f"{paths.shown(path)} has two cells that are the same (`{params.first_line(source)}`)"
        require(source not in seen, f"{twice}, which `run` cannot tell apart; change one, by a comment for example")
        seen.add(source)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the experiments whose outputs are not up to date; return the exit code (0, 1 or 130). If one fails, the
    others still run. Raises `T1Error` before anything runs: as `plan` does, for a parameter that is given twice, and
    for a GPU profile without a GPU."""
    given = [name for name, _ in arguments.parameters]
    twice = next((name for name in given if given.count(name) > 1), None)
    require(twice is None, f"-p {twice} is given twice; allowed: once")
    profile, resolved = plan(arguments.experiments, arguments.profile, dict(arguments.parameters))
    due = []
    for experiment, parameters in resolved.items():
        final = paths.outputs(profile, experiment)
        recover(final)
        why = manifest.difference(final, experiment, parameters)
        if why or arguments.force:
            manifest.require_replaceable(final)
            due.append(experiment)
            print(f"{experiment} [{profile}] to run: {why or 'forced'}")
        else:
            print(f"{experiment} [{profile}] up to date ({_measured(manifest.read(final))})")
    if not due:
        print(f"nothing to do: {len(resolved)} up to date")
        return 0
    manifest.require_gpu(profile)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        failed = [experiment for experiment in due if not _attempt(experiment, profile, resolved[experiment])]
    except KeyboardInterrupt:
        print("interrupted: the experiment that was running is not finished; run again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    counts = f"{len(due) - len(failed)} run, {len(resolved) - len(due)} up to date, {len(failed)} failed"
    print(f"{counts}: {', '.join(failed)}" if failed else f"{counts}; see {paths.shown(final.parent)}")
    return int(bool(failed))


def _attempt(experiment: str, profile: str, parameters: params.Values) -> bool:
    """Run one experiment, publish its folder, and say how long it took; returns whether it finished."""
    label, final = f"{experiment} [{profile}]", paths.outputs(profile, experiment)
    staging = paths.staging(profile, experiment)
    print(f"{label}: started", file=sys.stderr, flush=True)
    outcome, clock = "interrupted", time.perf_counter()
    try:
        with locked(staging.with_suffix(".lock"), "is being run by another process; wait for it"):
            with writing(staging):
                remove(staging)  # left by a run that failed or was killed
                staging.mkdir(parents=True)
            ran = {"notebook": fingerprint.notebook(experiment)}  # it may be edited while its kernel starts
            _execute(experiment, parameters, staging)
            made_of = manifest.read(staging)["made_of"] | ran
            manifest.change(staging, made_of=made_of, files=manifest.files(staging))  # with executed.ipynb
            manifest.publish(staging, final)
        outcome = "done"
    except T1Error as error:
        outcome = "failed"
        print(f"error: {label} {error}", file=sys.stderr)
    finally:
        took = tqdm.format_interval(time.perf_counter() - clock)
        print(f"{label}: {outcome} after {took}", file=sys.stderr, flush=True)
    return outcome == "done"


def _execute(experiment: str, parameters: params.Values, staging: Path) -> None:
    """Execute an experiment's notebook into `staging`/executed.ipynb. Raises `T1Error` for a cell that fails, a kernel
    that dies, and an end without `run.finish()`; `KeyboardInterrupt` after the kernel has been shut down."""
    executed = staging / "executed.ipynb"
    options = dict(kernel_name="python3", cwd=paths.root(), progress_bar=False, log_output=False)
    options |= dict(coalesce_streams=True)  # saves a notebook's progress bar as a single line of output
    # Else ipykernel warns about TCP without encryption at every start, and of the interrupt that ends it.
    options |= dict(extra_arguments=["--IPKernelApp.log_level=CRITICAL"])
    # Set for the kernel: its folders; for Jupyter in this process: this Python's kernels come before the user's own.
    given = {"T1_ROOT": str(paths.root()), "T1_STAGING": str(staging), "JUPYTER_PREFER_ENV_PATH": "1"}
    with patch.dict(os.environ, given):
        try:
            papermill.execute_notebook(paths.notebook(experiment), executed, parameters, **options)
        except KeyboardInterrupt:
            # Nothing awaits the interrupted cell's task any more; asyncio would log its failure when the kernel ends.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            for process in psutil.Process().children(recursive=True):  # a kernel hears no Ctrl-C at the terminal
                with contextlib.suppress(psutil.Error):
                    process.kill()
            raise
        except Exception as error:
            where, name, told = "", type(error).__name__, str(error)  # such as of a kernel that died, or a full disk
            if isinstance(error, PapermillExecutionError):
                where = f"cell In [{error.exec_count}] (`{params.first_line(error.source)}`): "
                name, told = error.ename, error.evalue or ""
            why = f"{where}{name}: {''.join(told.strip().splitlines()[:1])[:300]}"
            raise T1Error(f"{why}\n       its notebook as far as it came: {paths.shown(executed)}") from None
    require(manifest.read(staging) is not None, "the notebook ended without run.finish()")
    # Absolute paths, of the checkout or of packages, would reveal a user's or a machine's folders: make them relative.
    text = executed.read_text(encoding="utf-8")
    folders = {folder for folder in map(Path, [paths.root(), *sys.path]) if folder.is_absolute() and folder.name}
    for folder in sorted(map(str, folders), key=len, reverse=True):
        text = text.replace(json.dumps(folder + os.sep, ensure_ascii=False)[1:-1], "")
    with writing(executed):
        executed.write_text(text, encoding="utf-8", newline="\n")


def _measured(content: Mapping[str, Any]) -> str:
    return f"measured {content['started']} on {manifest.device(content)} in {content['seconds']:.0f} s"


def _stale(experiment: str, profile: str) -> str | None:
    """Why an experiment's outputs are not as its notebook, parameters and code have them now; None if they are."""
    folder, values = paths.outputs(profile, experiment), params.resolve(experiment, profile)
    return manifest.difference(folder, experiment, values, drawn=True)


def _state(experiment: str, profile: str) -> str:
    """Whether an experiment's outputs are done, stale (and why) or missing; when and where they were measured."""
    if not paths.params_file(profile, experiment).is_file():
        return "no parameters"
    content, why = manifest.read(paths.outputs(profile, experiment)), _stale(experiment, profile)
    if content is None:
        return "missing" if why == "missing" else f"stale    {why}"
    return f"stale    {why}; {_measured(content)}" if why else f"done     {_measured(content)}"


def list_command(_: argparse.Namespace) -> int:
    """Print experiments and the state of their outputs, and of PDFs that have to be built again; returns 0."""
    print(f"profiles: {', '.join(params.profiles())} (auto here: {manifest.default_profile()})")
    for experiment in params.experiments():
        print(f"\n{experiment}  {params.title(experiment)}".rstrip())
        for profile in params.profiles():
            pdf = manifest.other_pdf(paths.outputs(profile, experiment))
            print(f"  {profile:<8} {_state(experiment, profile)}{f'; {pdf}' if pdf else ''}")
    return 0


def report_command(arguments: argparse.Namespace) -> int:
    """Redraw what has changed since its run, write the claims into docs/results.md, and build the PDFs; returns 0."""
    from t1lib.kit import latex
    from t1lib.kit.run import redraw

    matplotlib.use("Agg")  # writes files only, and needs no display
    profile = manifest.default_profile() if arguments.profile == "auto" else arguments.profile
    folder = paths.root() / "outputs" / choose("profile", profile, [*params.profiles(), "auto"])
    finished = [name for name in params.experiments() if manifest.read(folder / name)]
    require(bool(finished), f"no finished run in {paths.shown(folder)}; `python -m t1lib run` makes them")
    for experiment in finished:
        told = "drawn already"
        if _stale(experiment, profile):
            told = f"redrew {len(redraw(profile, experiment))} files"
            why = _stale(experiment, profile)  # now only if it has to be measured again
            told += f"; its run is stale: {why}" if why else ""
        print(f"{experiment} [{profile}] {told}")
    claims.write_page()
    try:
        for path in latex.build(profile) if not arguments.no_pdf else ():
            print(f"built {paths.shown(path)}")
    except UnavailableError as error:
        print(f"reports not built: {error}")
    return 0
