"""The command line: `python -m t1lib run | list | report | check | plan | train`."""

import sys

from t1lib import signals

if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    signals.watch()  # before the slow imports, which take seconds

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from t1lib import claims, driver, params, paths
from t1lib.errors import T1Error, UnavailableError, choose, require
from t1lib.measure import manifest
from t1lib.measure.environment import default_profile
from t1lib.plan import command as planning
from t1lib.text import command as training

EXIT_BAD_INPUT = 2


def _run(arguments: argparse.Namespace) -> int:
    return driver.run(arguments.experiments, arguments.profile, dict(arguments.parameters), arguments.force)


def _state(experiment: str, profile: str) -> str:
    """Return "done", "stale" (and why) or "missing" for an experiment under a profile; when and where it was run."""
    folder = paths.outputs(profile, experiment)
    content = manifest.read(folder)
    if content is None:
        why = manifest.damage(folder)
        return "missing" if why == "missing" else f"stale    {why}"
    why = manifest.difference(folder, experiment, params.resolve(experiment, profile))
    measured = f"measured {content['started']} on {manifest.device(content)} in {content['seconds']:.0f} s"
    return f"stale    {why}; {measured}" if why else f"done     {measured}"


def _list(arguments: argparse.Namespace) -> int:
    profiles, named = params.profiles(), arguments.experiments
    for name in named:
        choose("experiment", name, params.experiments())
    print(f"profiles: {', '.join(profiles)} (auto here: {default_profile()})")
    for experiment in named or params.experiments():
        kit = params.read_notebook(paths.notebook(experiment)).get("metadata", {}).get("t1", {})
        print(f"\n{experiment}  {kit.get('title', '')}".rstrip())
        for profile in profiles:
            has_file = paths.params_file(profile, experiment).is_file()
            print(f"  {profile:<8} {_state(experiment, profile) if has_file else 'no parameters'}")
        for name, parameter in params.declared(experiment).items() if named else ():
            print(f"    -p {name} {parameter.type} = {parameter.default!r}  {parameter.help}".rstrip())
    if not named:
        print("\nparameters of one: python -m t1lib list EXPERIMENT")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    os.environ["MPLBACKEND"] = "Agg"  # writes files only, and needs no display
    from t1lib.notebook import redraw

    profile = default_profile() if arguments.profile == "auto" else arguments.profile
    choose("profile", profile, [*params.profiles(), "auto"])
    folder = paths.root() / "outputs" / profile
    finished = [name for name in params.experiments() if manifest.read(folder / name)]
    require(bool(finished), f"no finished run in {paths.shown(folder)}; `python -m t1lib run` makes them")
    for experiment in finished:
        print(f"{experiment} [{profile}] redrew {len(redraw(profile, experiment))} files")
    if arguments.no_pdf:
        return 0
    from t1lib.report import latex

    try:
        for path in latex.build(profile):
            print(f"built {paths.shown(path)}")
    except UnavailableError as error:
        print(f"reports not built: {error}")
    return 0


def _parser() -> argparse.ArgumentParser:
    what = "Run, report and check the experiments of the kit; plan and train models."
    parser = argparse.ArgumentParser(prog="python -m t1lib", description=what)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run the experiments whose outputs are not up to date")
    run.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="names, or all (default: all)")
    run.add_argument("--profile", default="auto", help="a folder of params/, or auto: by this machine's GPU (default)")
    run.add_argument("--force", action="store_true", help="run also what is up to date")
    run.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter"
    )
    run.set_defaults(command=_run)

    listing = commands.add_parser("list", help="show experiments and the state of their outputs, or all about one")
    listing.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="whose parameters to show, too")
    listing.set_defaults(command=_list)

    report = commands.add_parser("report", help="redraw everything from the samples and build the reports")
    report.add_argument("--profile", default="auto", help="whose outputs (default: this machine's profile)")
    report.add_argument("--no-pdf", action="store_true", help="leave the reports' PDF files out")
    report.set_defaults(command=_report)
    claims.add_parser(commands)
    planning.add_parser(commands)
    training.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 (an experiment or claim failed), 2 (bad input), 130 (interrupted)."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except (T1Error, UnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return driver.EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return driver.EXIT_FAILED


def end(code: int) -> NoReturn:
    """End the process. Ranks of torchrun end without shutting down the interpreter: while that goes on, a thread of
    gloo's that lets go of its last tensor would abort the process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    end(code)
