"""Builds the two reports as PDF from the outputs of a profile's finished runs. Only this part of the kit needs TeX.

Besides `numbers.tex` of its run, a report reads a generated `context.tex`, which holds what the run's manifest says.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from t1lib import paths
from t1lib.errors import T1Error, UnavailableError, require
from t1lib.files import whole
from t1lib.measure import manifest
from t1lib.measure.records import Numbers, escape_latex

REPORTS = ("t1m1", "t1m3")
BOTH = ("convergence", "frontier")  # experiments that both reports quote if their runs are finished

_TEX = "on Debian texlive-latex-recommended and lmodern, else MacTeX or MiKTeX"
# With -file-line-error, errors begin with "./t1m1.tex:12: "; errors outside any file begin with "! ".
_ERROR = re.compile(r"^(?:(?:\./)?[^\s:]+\.\w+:\d+: |! ).+", re.M)
_UNDEFINED = re.compile(r"^LaTeX Warning: (?:Citation|Reference) .+ undefined.*", re.M)  # would print "??"
# Not copied: other reports, and what somebody's own TeX left in report/, from which run, nobody knows.
_OTHERS = shutil.ignore_patterns("*numbers.tex", "context.tex", "figures", "tables", *(f"{name}.*" for name in REPORTS))


def build(profile: str) -> list[Path]:
    """Build outputs/<profile>/<report>.pdf of every report whose experiment has a finished run; return their paths. The
    same outputs and report sources give the same file, byte for byte. Raises `UnavailableError` without TeX, and
    `T1Error` if no run is finished or LaTeX fails, naming its first error (such as a number that the run lacks)."""
    folders = [paths.outputs(profile, report) for report in REPORTS]
    finished, shown = [folder for folder in folders if manifest.read(folder)], paths.shown(folders[0].parent)
    command = f"python -m t1lib run {' '.join(REPORTS)} --profile {profile}"
    require(bool(finished), f"no finished run to report on in {shown}; make one: {command}")
    if missing := [tool for tool in ("pdflatex", "bibtex") if shutil.which(tool) is None]:
        told = f"not found: {', '.join(missing)}; the PDF files need TeX: {_TEX}"
        raise UnavailableError(f"{told};\nall else is in {shown} already")
    return [_build_one(folder) for folder in finished]


def _build_one(outputs: Path) -> Path:
    """Build the report on one finished run, next to its folder. Files of runs in `BOTH` have their names as prefix."""
    runs = {outputs.with_name(name): f"{name}-" for name in BOTH} | {outputs: ""}
    contents = {run: manifest.read(run) for run in runs}
    final = outputs.with_name(f"{outputs.name}.pdf")
    with tempfile.TemporaryDirectory(prefix="t1-report-") as temporary:
        source = paths.root() / "report" / f"{outputs.name}.tex"
        require(source.is_file(), f"{paths.shown(source)}, the report's source, is missing")
        folder = shutil.copytree(source.parent, Path(temporary), dirs_exist_ok=True, ignore=_OTHERS)
        shutil.copy(source, folder)
        read = {f"report/{name}": entry for name, entry in manifest.files(folder).items()}
        for run, before in runs.items():
            made = (run / "numbers.tex", *run.glob("tables/*.tex"), *run.glob("figures/*.pdf"))
            read |= {paths.shown(path): manifest.entry(path) for path in made}
            for path in made if contents[run] else ():
                copy = folder / path.relative_to(run).with_name(f"{before}{path.name}")
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        write_context(contents[outputs], folder / "context.tex")
        _compile(folder, outputs.name, contents[outputs]["started"])
        same = all(manifest.read(run) == content for run, content in contents.items())
        require(same, f"a run changed while the report {outputs.name} was built; its PDF is as it was: report again")
        with whole(final) as partial:
            shutil.copyfile(folder / f"{outputs.name}.pdf", partial)
    manifest.change(outputs, report=manifest.entry(final), report_of=read)
    return final


def write_context(content: Mapping[str, Any], path: Path) -> None:
    r"""Write the LaTeX file that describes a report's run, from its manifest.

    Keys of `\result`: run.{experiment, profile, device, commit, dirty, date, started, seconds}, env.<entry of the
    environment>, param.<parameter>. `\ifgpu` is true where a GPU was measured; `\allparameters` lists all parameters.
    """
    numbers, environment = Numbers(), content["environment"]
    run = {name: content[name] for name in ("experiment", "profile", "commit", "dirty", "started", "seconds")}
    run |= {"date": content["started"][:10], "device": manifest.device(content)}
    for group, entries in (("run", run), ("env", environment), ("param", content["parameters"])):
        for name, value in entries.items():
            numbers.set(f"{group}.{name}", _shown(value))
    numbers.save_tex(path)
    given = ((escape_latex(name), escape_latex(_shown(value))) for name, value in content["parameters"].items())
    listed = ", ".join(rf"\mbox{{\texttt{{{name}}}}}~=~{value}" for name, value in given)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(rf"\newif\ifgpu\gpu{'true' if 'gpu' in environment else 'false'}" + "\n")
        file.write(rf"\newcommand{{\allparameters}}{{{listed}}}" + "\n")


def _shown(value: Any) -> str:
    """A setting as its author wrote it, such as 0.0001, not rounded to three significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_shown(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _compile(folder: Path, report: str, started: str) -> None:
    """Run TeX in `folder`, with the run's date in place of today's so that the PDF depends only on its inputs. Raises
    an error that names the first problem that TeX reported."""
    dates = {"SOURCE_DATE_EPOCH": f"{datetime.fromisoformat(started).timestamp():.0f}", "FORCE_SOURCE_DATE": "1"}
    environment = {**os.environ, **dates, "max_print_line": "1000"}  # else TeX breaks its messages at 79 characters
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-file-line-error", report]
    for command in (latex, ["bibtex", report], latex, latex):
        done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
        log = done.stdout.decode(errors="replace")
        if done.returncode:
            break
    found = _ERROR.search(log) if done.returncode else _UNDEFINED.search(log)
    if done.returncode or found:
        first = found[0] if found else (log.strip().splitlines() or ["no message"])[-1]
        raise T1Error(f"LaTeX could not build the report {report}; its PDF is as it was before:\n{first}")
