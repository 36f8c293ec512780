"""The commands that run, list and report experiments. They need what the extra `kit` installs."""

import argparse
import os

from t1lib import claims, params, paths
from t1lib.driver import run_command as run_command  # from here, so that what the kit lacks is said before it runs
from t1lib.errors import UnavailableError, choose, require
from t1lib.measure import manifest
from t1lib.measure.environment import default_profile


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


def list_command(arguments: argparse.Namespace) -> int:
    """Print experiments and the state of their outputs; returns 0."""
    profiles, named = params.profiles(), arguments.experiments
    for name in named:
        choose("experiment", name, params.experiments())
    print(f"profiles: {', '.join(profiles)} (auto here: {default_profile()})")
    for experiment in named or params.experiments():
        print(f"\n{experiment}  {params.about(experiment).get('title', '')}".rstrip())
        for profile in profiles:
            has_file = paths.params_file(profile, experiment).is_file()
            print(f"  {profile:<8} {_state(experiment, profile) if has_file else 'no parameters'}")
        for name, parameter in params.declared(experiment).items() if named else ():
            print(f"    -p {name} {parameter.type} = {parameter.default!r}  {parameter.help}".rstrip())
    if not named:
        print("\nparameters of one: python -m t1lib list EXPERIMENT")
    return 0


def report_command(arguments: argparse.Namespace) -> int:
    """Redraw what is finished, unless nothing has changed since its run; write the claims into docs/results.md, and
    build the PDFs; returns 0."""
    os.environ["MPLBACKEND"] = "Agg"  # writes files only, and needs no display
    from t1lib.kit.redraw import redraw

    profile = default_profile() if arguments.profile == "auto" else arguments.profile
    choose("profile", profile, [*params.profiles(), "auto"])
    folder = paths.root() / "outputs" / profile
    finished = [name for name in params.experiments() if manifest.read(folder / name)]
    require(bool(finished), f"no finished run in {paths.shown(folder)}; `python -m t1lib run` makes them")
    for experiment in finished:
        drawn = _state(experiment, profile).startswith("done") and not manifest.damage(folder / experiment)
        print(f"{experiment} [{profile}]", "is drawn" if drawn else f"redrew {len(redraw(profile, experiment))} files")
    claims.write_page()
    if arguments.no_pdf:
        return 0
    from t1lib.kit import latex

    try:
        for path in latex.build(profile):
            print(f"built {paths.shown(path)}")
    except UnavailableError as error:
        print(f"reports not built: {error}")
    return 0
