"""`python -m t1lib check`: do the measurements support the claims in claims.yaml?

claims.yaml is the single source of all claims; `write_page` generates the tables of docs/results.md from it.
"""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from t1lib import params, paths
from t1lib.errors import T1Error, choose, require, shown
from t1lib.files import whole
from t1lib.measure import manifest

PROFILE = "h200"  # the one that the claims are about
FILE, PAGE = "claims.yaml", "docs/results.md"
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
NUMBERS, TEX = "numbers.json", "numbers.tex"
HEAD = "| claim | published | ours | within | key |\n| --- | --- | --- | --- | --- |\n"
FORM = "claim, published, ours (1.78 ×), within (15 %, ≤ 0.02 or exact), key (t1m3.…)"
_TABLE = re.compile(r"(<!-- claims of (\w+) -->\n).*?(<!-- end of claims -->)", re.DOTALL)
_NUMBER = r"(\d{1,3}(,\d{3})+(\.\d+)?|\d+(\.\d+)?(e[+-]?\d+)?)"


def _first_number(text: str) -> float:
    found = re.search(_NUMBER, text)
    return float(found[0].replace(",", "")) if found else 0.0


@dataclass(frozen=True, config={"extra": "forbid"})
class Claim:
    """A claim about one number: `ours` is the measured value with its unit; `within` says which values another run may
    have: at most a percentage away from ours (`15 %`), up to a limit (`≤ 0.02`), or ours alone (`exact`). The number's
    unit is that of ours; a ratio, written with ×, has none."""

    claim: str
    published: str
    ours: Annotated[str, Field(pattern=rf"^{_NUMBER}( .*)?$")]
    within: Annotated[str, Field(pattern=rf"^({_NUMBER} %|≤ {_NUMBER}|exact)$")]
    key: Annotated[str, Field(pattern=r"^\w+\.[\w.-]+$")]

    def fault(self, number: Mapping[str, Any]) -> str | None:
        """Why a number of a run, an entry of numbers.json, does not support the claim; None if it does."""
        value, ours, bound = number["value"], _first_number(self.ours), _first_number(self.within)
        if not isinstance(value, int | float):
            return "no number"
        if number["unit"] != self.ours.partition(" ")[2].removeprefix("×"):
            return "claimed in another unit"
        if "≤" not in self.within:
            return None if abs(value - ours) <= abs(ours) * bound / 100 else "measured otherwise"
        if ours > bound:
            return "claimed above its own limit"
        return "measured above the limit" if value > bound else None


def read_claims() -> dict[str, list[Claim]]:
    """Experiment → claims, from claims.yaml. Raises `T1Error` if it cannot be read, is not valid, or holds none."""
    try:
        claims = TypeAdapter(dict[str, list[Claim]]).validate_python(params.read_yaml(paths.root() / FILE))
    except ValidationError as error:
        wrong = error.errors()[0]
        place = " ".join(map(str, (FILE, *wrong["loc"])))
        raise T1Error(f"{place}: {shown(wrong['input'])}; allowed: a list for each experiment, of {FORM}") from None
    require(any(claims.values()), f"{FILE} holds no claims")
    for experiment, claim in ((name, claim) for name, own in claims.items() for claim in own):
        fits = claim.key.startswith(f"{experiment}.")
        require(fits, f"{FILE}: {shown(claim.key)} in the list of {shown(experiment)}; allowed: keys of its own")
    return claims


def write_page() -> None:
    """Write the claims of each experiment into its table in docs/results.md. Raises `T1Error` as `read_claims` does."""
    path, tables = paths.root() / PAGE, {}
    for experiment, claims in read_claims().items():
        rows = [f"| {c.claim} | {c.published} | {c.ours} | {c.within} | `{c.key}` |\n" for c in claims]
        tables[experiment] = "".join([HEAD, *rows])
    text = path.read_text(encoding="utf-8")
    missing = tables.keys() - {name for _, name, _ in _TABLE.findall(text)}
    require(not missing, f"{PAGE} has no place for claims of {', '.join(sorted(missing))}")
    made = _TABLE.sub(lambda found: found[1] + tables.get(found[2], "") + found[3], text)
    if made != text:
        with whole(path) as partial_path:
            partial_path.write_text(made, encoding="utf-8", newline="\n")


def doubts(folder: Path, experiment: str) -> str | None:
    """Why the numbers in a run's folder cannot be trusted to decide its claims. None if they can: the manifest is this
    experiment's, with the profile's parameters, all files are as it lists them, and samples.csv gives these numbers, in
    numbers.json and numbers.tex."""
    if why := manifest.damage(folder):
        return why
    content = manifest.read(folder)
    of = content.get("experiment"), content.get("profile")
    if of != (experiment, PROFILE) or not {"samples.csv", NUMBERS} <= content["files"].keys():
        return f"{manifest.NAME} is not that of a finished run of {experiment} with profile {PROFILE}"
    from t1lib.kit.run import run_cells  # loads plotting libraries, so not at the top

    try:
        manifest.require_finished(folder, params.resolve(experiment, PROFILE))
        with tempfile.TemporaryDirectory() as scratch:
            run_cells(PROFILE, experiment, Path(scratch), figures=False)
            again = json.loads((Path(scratch) / NUMBERS).read_bytes())
            same_tex = manifest.entry(Path(scratch) / TEX) == manifest.entry(folder / TEX)
    except T1Error as error:
        return str(error)
    kept = json.loads((folder / NUMBERS).read_bytes())
    other = sorted(key for key in kept.keys() | again.keys() if not _alike(kept.get(key), again.get(key)))
    other += [TEX] * (not same_tex)
    return f"{other[0]} does not follow from samples.csv" if other else None


def _alike(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> bool:
    """Whether two entries (None: missing) agree but for a fit's last digits, which depend on its arrays' addresses."""
    values = [entry and entry["value"] for entry in (a, b)]
    near = all(isinstance(value, float) for value in values) and math.isclose(*values, rel_tol=1e-12)
    return a == b or (near and {**a, "value": b["value"]} == b)


def _check_run(experiment: str, claims: Sequence[Claim]) -> list[str]:
    """Print and return the verdicts on an experiment's claims. If `doubts` has any, all fail (no claims: one FAIL)."""
    folder = paths.outputs(PROFILE, experiment)
    if not (folder / manifest.NAME).is_file():
        print(f"{experiment}: {NOT_RUN}; python -m t1lib run {experiment} --profile {PROFILE}")
        return [NOT_RUN] * len(claims)
    why, content, numbers = doubts(folder, experiment), manifest.read(folder), {}
    if why is None and content:
        numbers = json.loads((folder / NUMBERS).read_bytes())
        commit = content["commit"][:7] + " with changes" * (content["dirty"] is True)
        intact = f"{len(content['files'])} files as the manifest lists them, numbers as samples.csv gives them"
        why = f"commit {commit}, {manifest.device(content)}, {content['started']}; {intact}"
    print(f"{experiment}: {why}")
    verdicts = []
    for claim in claims:
        found = numbers.get(claim.key, {"value": None, "text": "–", "unit": ""})
        fault, measured = claim.fault(found), f"{found['text']} {found['unit']}".strip()
        verdicts.append(FAIL if fault else PASS)
        told = f"{claim.key}: {measured} (claimed: {claim.ours}, {claim.within})"
        print(f"  {verdicts[-1]}  {told}{f', {fault}' if fault else ''}")
    return verdicts if verdicts or numbers else [FAIL]


def check_command(_: argparse.Namespace) -> int:
    """Check the claims of all experiments; returns 1 if one fails or a run is in doubt."""
    claims, known, verdicts = read_claims(), params.experiments(), []
    for name in claims:
        choose("experiment", name, known)
    for name in known:
        verdicts += _check_run(name, claims.get(name, []))
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in (PASS, FAIL, NOT_RUN))
    print(f"{len(verdicts)} checks: {counts}")
    return int(FAIL in verdicts)
