"""The command line: `python -m t1lib run | list | report | check | plan | train`."""

import sys

from t1lib import signals

if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    signals.watch()  # before the slow imports, which take seconds

import argparse
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from t1lib.errors import T1Error, UnavailableError
from t1lib.plan import command as planning
from t1lib.text import command as training

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def _of_the_kit(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of `t1lib.commands`, which is imported when it is called: the plain installation lacks what it needs.
    That is a `T1Error` of the command."""

    def command(arguments: argparse.Namespace) -> int:
        try:
            return getattr(import_module("t1lib.commands"), f"{name}_command")(arguments)
        except ModuleNotFoundError as error:
            needed = (error.name or "t1lib").split(".")[0]
            if needed == "t1lib":
                raise
            raise T1Error(
                f"`{name}` needs {needed}, which is not installed; the extra kit brings all that notebooks need:\n"
                'pip install -c constraints.txt -e ".[kit]" in the checkout'
            ) from error

    return command


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
    run.set_defaults(command=_of_the_kit("run"))

    listing = commands.add_parser("list", help="show experiments and the state of their outputs, or all about one")
    listing.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="whose parameters to show, too")
    listing.set_defaults(command=_of_the_kit("list"))

    report = commands.add_parser("report", help="redraw everything from the samples and build the reports")
    report.add_argument("--profile", default="auto", help="whose outputs (default: this machine's profile)")
    report.add_argument("--no-pdf", action="store_true", help="leave the reports' PDF files out")
    report.set_defaults(command=_of_the_kit("report"))

    check = commands.add_parser("check", help="hold claims.yaml against outputs/h200")
    check.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="whose claims (default: all)")
    check.set_defaults(command=_of_the_kit("check"))
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
        return signals.EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


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
