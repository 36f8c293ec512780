"""`python -m t1lib check`: does what was measured bear out docs/results.md?

Its tables between the marks `claims` are the one place that says what is claimed: a row has the claim, the
published value, ours, how far another run's may be from it, and the number's key. The bound is a percentage of our
value (`15 %`), a limit (`≤ 0.02`), or `exact`.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t1lib import params, paths
from t1lib.errors import T1Error, choose, require
from t1lib.measure import manifest
from t1lib.measure.records import Numbers

PROFILE = "h200"  # that the claims are about
PAGE = "docs/results.md"  # that holds them
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
SAMPLES, NUMBERS_FILE = "samples.csv", "numbers.json"
_MARKED = re.compile(r"<!-- claims -->(.*)<!-- end of claims -->", re.DOTALL)
_KEY = re.compile(r"`(\w+\.[\w.-]+)`")
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_OURS = re.compile(rf"({_NUMBER})(?: .*)?")
_BOUND = re.compile(rf"(?P<percent>{_NUMBER}) %|≤ (?P<limit>{_NUMBER})|exact")
_FORM = "| claim | published | ours | 15 %, ≤ 0.02 or exact | `experiment.key` |"


def _value(text: str) -> float:
    return float(text.replace(",", ""))


@dataclass(frozen=True)
class Claim:
    """A row of the tables; `ours` is the number as it is printed there, without its unit."""

    what: str
    published: str
    ours: str
    bound: str
    key: str

    @property
    def experiment(self) -> str:
        return self.key.split(".")[0]

    def holds(self, value: Any) -> bool:
        """Whether a run that measured this value bears the claim out (no number: it does not)."""
        bound = _BOUND.fullmatch(self.bound)
        if not isinstance(value, int | float) or bound is None:
            return False
        if bound["limit"]:
            return value <= _value(bound["limit"])
        ours = _value(self.ours)
        return abs(value - ours) <= abs(ours) * _value(bound["percent"] or "0") / 100


def read_claims(text: str) -> list[Claim]:
    """All claims in the text of docs/results.md, in its order.

    Raises `T1Error` if there are none, and for a row of their tables that is not of the form that it names.
    """
    marked = _MARKED.search(text)
    require(marked is not None, f"{PAGE} has no tables between <!-- claims --> and <!-- end of claims -->")
    claims = []
    for line in marked[1].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or cells[0] == "claim" or not "".join(cells).strip("-: "):
            continue
        row = len(cells) == 5 and [_OURS.fullmatch(cells[2]), _BOUND.fullmatch(cells[3]), _KEY.fullmatch(cells[4])]
        require(bool(row) and None not in row, f"{PAGE}: {line.strip()!r}; allowed: {_FORM}")
        claims.append(Claim(cells[0], cells[1], row[0][1], cells[3], row[2][1]))
    require(bool(claims), f"{PAGE}'s tables hold no claims")
    return claims


def doubts(folder: Path, experiment: str) -> str | None:
    """Why the numbers in a run's folder are no answer to its claims; None if they are.

    The manifest must be this experiment's, the parameters the profile's, every file the one that the manifest lists,
    and the numbers must come out of the samples again.
    """
    content, wanted = manifest.read(folder), params.resolve(experiment, PROFILE)
    if content is None:
        return manifest.damage(folder)
    of = content.get("experiment"), content.get("profile")
    if of != (experiment, PROFILE) or not {SAMPLES, NUMBERS_FILE} <= content["files"].keys():
        return f"{manifest.NAME} is not that of a finished run of {experiment} with profile {PROFILE}"
    for name, value in content.get("parameters", {}).items():
        now = wanted.get(name, value)
        added = isinstance(now, list) and isinstance(value, list) and all(x in now for x in value)
        if now != value and not added:  # no claim speaks of what was added to a list and is not measured yet
            return f"run with {name}={value!r}, params/{PROFILE} has {now!r}"
    if why := manifest.damage(folder):
        return why
    from t1lib.kit.redraw import numbers_again  # draws, which the other commands need not load

    try:
        with tempfile.TemporaryDirectory() as scratch:
            again = numbers_again(PROFILE, experiment, Path(scratch))
    except T1Error as error:
        return str(error)
    kept = Numbers.load_json(folder / NUMBERS_FILE)
    other = sorted(key for key in kept.keys() | again.keys() if kept.get(key) != again.get(key))
    return f"{other[0]} does not follow from {SAMPLES}" if other else None


def _about(content: dict[str, Any]) -> str:
    commit = str(content["commit"])[:7] + " with changes" * (content["dirty"] is True)
    whole = f"{len(content['files'])} files as the manifest lists them, numbers as {SAMPLES} gives them"
    return f"commit {commit}, {manifest.device(content)}, {content['started']}; {whole}"


def _check_run(experiment: str, claims: Sequence[Claim]) -> list[str]:
    """Print what one experiment's run says of its claims; returns their verdicts, and FAIL for a run in doubt."""
    folder = paths.outputs(PROFILE, experiment)
    if not (folder / manifest.NAME).is_file():
        print(f"{experiment}: {NOT_RUN}; python -m t1lib run {experiment} --profile {PROFILE}")
        return [NOT_RUN] * len(claims)
    why = doubts(folder, experiment)
    print(f"{experiment}: {why or _about(manifest.read(folder) or {})}")
    numbers: dict[str, Any] = Numbers.load_json(folder / NUMBERS_FILE) if why is None else {}
    verdicts = []
    for claim in claims:
        found = numbers.get(claim.key, {"value": None, "text": "–", "unit": ""})
        verdicts.append(PASS if claim.holds(found["value"]) else FAIL)
        measured = f"{found['text']} {found['unit']}".strip()
        print(f"  {verdicts[-1]}  {claim.key}: {measured} (claimed: {claim.ours}, {claim.bound})")
    return verdicts if why is None else verdicts or [FAIL]


def _check_others() -> list[str]:
    """FAIL for each run of another profile that is not as it was left; says what is wrong with it."""
    folders = sorted(path.parent for path in (paths.root() / "outputs").glob(f"*/*/{manifest.NAME}"))
    damaged = {folder: manifest.damage(folder) for folder in folders if folder.parent.name != PROFILE}
    for folder in (folder for folder, why in damaged.items() if why):
        print(f"{FAIL}  {paths.shown(folder)}: {damaged[folder]}")
    return [FAIL for why in damaged.values() if why]


def check(experiments: Sequence[str]) -> int:
    """Check the claims of `experiments` ("all", or nothing, for every one) and print what was found; returns the exit
    code: 0, or 1 if a claim fails or a run is in doubt."""
    path = paths.root() / PAGE
    try:
        claims = read_claims(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(f"cannot read the claims in {paths.shown(path)}: {error}") from None
    known = params.experiments()
    for name in [*experiments, *(claim.experiment for claim in claims)]:
        choose("experiment", name, [*known, "all"])
    every = not experiments or "all" in experiments
    chosen = {claim.experiment for claim in claims} if every else set(experiments)
    verdicts = []
    for name in (name for name in known if name in chosen):
        verdicts += _check_run(name, [claim for claim in claims if claim.experiment == name])
    verdicts += _check_others() if every else []
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in (PASS, FAIL, NOT_RUN))
    print(f"{len(verdicts)} checks: {counts}")
    return int(FAIL in verdicts)
