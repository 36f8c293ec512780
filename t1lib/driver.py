"""Runs experiments headless and resumably: validates everything first, skips what is done, publishes what finishes."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from t1lib import params, paths
from t1lib.errors import T1Error, choose, require
from t1lib.execute import NotebookError, execute
from t1lib.files import locked, writing
from t1lib.measure import manifest
from t1lib.measure.environment import default_profile, require_gpu
from t1lib.signals import EXIT_INTERRUPTED

EXIT_OK, EXIT_FAILED = 0, 1


@dataclass(frozen=True)
class Job:
    """One experiment under one profile, with its resolved parameters."""

    experiment: str
    profile: str
    parameters: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.experiment} [{self.profile}]"

    @property
    def final(self) -> Path:
        return paths.outputs(self.profile, self.experiment)

    @property
    def staging(self) -> Path:
        return paths.staging(self.profile, self.experiment)

    def expected_seconds(self) -> float | None:
        """Return how long the last run took, else the estimate in the notebook's metadata, else None."""
        last = (manifest.read(self.final) or {}).get("seconds")
        return last or params.about(self.experiment).get("expected_seconds", {}).get(self.profile)


def plan(names: Sequence[str], profile: str, overrides: Mapping[str, Any]) -> list[Job]:
    """Return the jobs of `names` ("all", or nothing, for every experiment) after checking all of them.

    An override goes to the experiments that declare it. Raises `T1Error` for an unknown experiment,
    profile or parameter, a value of the wrong type, and an output folder that cannot be written.
    """
    known = params.experiments()
    require(bool(known), f"no experiments: {paths.shown(paths.notebooks())}/ holds no notebook with parameters")
    chosen = known if not names or "all" in names else [choose("experiment", name, known) for name in names]
    profile = overrides.get("profile", default_profile()) if profile == "auto" else profile
    choose("profile", profile, [*params.profiles(), "auto"])
    declared = {name: params.declared(name) for name in dict.fromkeys(chosen)}
    for name in overrides:
        choose("parameter", name, dict.fromkeys(key for known_to in declared.values() for key in known_to))
    jobs = []
    for name, known_to in declared.items():
        own = {key: value for key, value in overrides.items() if key in known_to}
        jobs.append(Job(name, profile, params.resolve(name, profile, own)))
    measured = all(job.parameters.get("measure", True) for job in jobs)
    require(measured, "-p: `measure` is False, and `run` measures; `python -m t1lib report` draws finished runs again")
    folder = paths.root() / "outputs" / profile
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return jobs


def _run_one(job: Job) -> None:
    """Run one experiment and publish its folder. Raises `T1Error` if another process is running it."""
    with locked(job.staging.with_suffix(".lock"), f"{job.label} is being run by another process; wait for it"):
        shutil.rmtree(job.staging, ignore_errors=True)  # left by a run that failed or was killed
        job.staging.mkdir(parents=True)
        started, clock = manifest.utc_now(), time.perf_counter()
        execute(job.experiment, job.parameters, job.staging)
        seconds = time.perf_counter() - clock
        given = dict(experiment=job.experiment, profile=job.profile, parameters=job.parameters)
        manifest.write(job.staging, **given, started=started, seconds=seconds)
        manifest.publish(job.staging, job.final)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the experiments whose outputs are not up to date; return the exit code (0, 1 or 130).

    A notebook that fails keeps its executed copy in the staging folder, and the others still run.
    Raises `T1Error` before anything runs: as `plan` does, and for a GPU profile on a machine without a GPU.
    """
    jobs = plan(arguments.experiments, arguments.profile, dict(arguments.parameters))
    due = []
    for job in jobs:
        manifest.recover(job.final)
        why = manifest.difference(job.final, job.experiment, job.parameters)
        if why or arguments.force:
            manifest.require_replaceable(job.final)
            due.append(job)
            print(f"{job.label} to run: {why or 'forced'}")
        else:
            content = manifest.read(job.final) or {}
            print(f"{job.label} up to date (measured {content['started']} on {manifest.device(content)})")
    if not due:
        print(f"nothing to do: {len(jobs)} experiments up to date")
        return EXIT_OK
    require_gpu(jobs[0].profile)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        failed = [job for job in due if not _attempt(job)]
    except KeyboardInterrupt:
        print("interrupted: the experiment that was running is not finished; run again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{len(due) - len(failed)} run, {len(jobs) - len(due)} up to date, {len(failed)} failed", end="")
    where = f"; see {paths.shown(due[0].final.parent)}"
    print(f": {', '.join(job.experiment for job in failed)}" if failed else where)
    return EXIT_FAILED if failed else EXIT_OK


def _attempt(job: Job) -> bool:
    """Run one experiment, and say how long it takes; returns whether it finished."""
    expected, outcome, began = job.expected_seconds(), "interrupted", time.monotonic()
    about = f"expected {tqdm.format_interval(expected)}" if expected else "expected time unknown"
    print(f"{job.label}: started, {about}", file=sys.stderr, flush=True)
    try:
        _run_one(job)
        outcome = "done"
    except (NotebookError, T1Error) as error:
        outcome = "failed"
        print(f"error: {job.label} {error}", file=sys.stderr)
        if isinstance(error, NotebookError):
            print(f"       its notebook as far as it came: {paths.shown(job.staging)}/executed.ipynb", file=sys.stderr)
    finally:
        took = tqdm.format_interval(time.monotonic() - began)
        print(f"{job.label}: {outcome} after {took}", file=sys.stderr, flush=True)
    return outcome == "done"
