"""`python -m t1lib check`: does what was measured bear out the README?

The README's tables between the marks `claims` are the one place that says what is claimed: a row has the claim, the
published value, ours, how far another run's may be from it, and the number's key. The bound is a percentage of our
value (`15 %`), a limit (`≤ 0.02`), or `exact`.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t1lib import params, paths
from t1lib.errors import T1Error, choose, require
from t1lib.measure import manifest
from t1lib.measure.records import Numbers, Records

PROFILE = "h200"  # that the claims are about
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
_MARKED = re.compile(r"<!-- claims -->(.*)<!-- end of claims -->", re.DOTALL)
_KEY = re.compile(r"`(\w+\.[\w.-]+)`")
_BOUND = re.compile(r"(?P<percent>[\d.]+) %|≤ (?P<limit>[\d.e+-]+)|exact")


@dataclass(frozen=True)
class Claim:
    """A row of the README; `ours` is the number as it is printed there, without its unit."""

    what: str
    published: str
    ours: str
    bound: str
    key: str

    @property
    def experiment(self) -> str:
        return self.key.split(".")[0]

    def holds(self, value: float | None) -> bool:
        """Whether a run that measured this value bears the claim out (None: it measured none)."""
        bound = _BOUND.fullmatch(self.bound)
        if value is None or bound is None:
            return False
        if bound["limit"]:
            return value <= float(bound["limit"])
        ours = float(self.ours.replace(",", ""))
        return abs(value - ours) <= abs(ours) * float(bound["percent"] or 0) / 100


def read_claims(readme: str) -> list[Claim]:
    """All claims in the README's text, in its order.

    Raises `T1Error` for a row that names a key, but whose value or bound cannot be read.
    """
    marked = _MARKED.search(readme)
    require(marked is not None, "the README has no tables between <!-- claims --> and <!-- end of claims -->")
    claims = []
    for line in marked[1].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        key = _KEY.fullmatch(cells[-1])
        if key is None:
            continue
        ours = re.match(r"[\d.,e+-]*\d", cells[2]) if len(cells) == 5 else None
        whole = ours is not None and _BOUND.fullmatch(cells[3]) is not None
        require(whole, f"README: {line!r}; allowed: | claim | published | ours | 15 %, ≤ 0.02 or exact | `key` |")
        claims.append(Claim(cells[0], cells[1], ours[0], cells[3], key[1]))
    return claims


def doubts(folder: Path, experiment: str) -> str | None:
    """Why the numbers in a run's folder are no answer to its claims; None if they are.

    The parameters must be the profile's, every file the one that the manifest lists, and the numbers must come out of
    samples.csv again.
    """
    from t1lib.report import NUMBERS

    content, wanted = manifest.read(folder) or {"parameters": {}, "files": {}}, params.resolve(experiment, PROFILE)
    for name, value in content["parameters"].items():
        if name in wanted and wanted[name] != value:
            return f"run with {name}={value!r}, params/{PROFILE} has {wanted[name]!r}"
    for name in content["files"]:
        if manifest.changed(folder, name):
            return f"{name} is not the file that the manifest lists"
    again = Numbers()
    NUMBERS[experiment](Records.load(folder / "samples.csv").frame(), again)
    kept = Numbers.load_json(folder / "numbers.json")
    other = sorted(key for key in kept.keys() | again.keys() if kept.get(key) != again.get(key))
    return f"{other[0]} does not follow from samples.csv" if other else None


def _check_run(experiment: str, claims: Sequence[Claim]) -> list[str]:
    """Print what one experiment's run says of its claims; returns their verdicts."""
    folder = paths.outputs(PROFILE, experiment)
    content = manifest.read(folder)
    if content is None:
        print(f"{experiment}: {NOT_RUN}; python -m t1lib run {experiment} --profile {PROFILE}")
        return [NOT_RUN] * len(claims)
    why = doubts(folder, experiment)
    where = f"commit {content['commit'][:7]}, {content['made_of']['device']}, {content['started']}"
    sound = f"{len(content['files'])} files as the manifest lists them, numbers as samples.csv gives them"
    print(f"{experiment}: {where}; {why or sound}")
    numbers: dict[str, Any] = Numbers.load_json(folder / "numbers.json") if why is None else {}
    verdicts = []
    for claim in claims:
        found = numbers.get(claim.key, {"value": None, "text": "–", "unit": ""})
        verdicts.append(PASS if claim.holds(found["value"]) else FAIL)
        measured = f"{found['text']} {found['unit']}".strip()
        print(f"  {verdicts[-1]}  {claim.key}: {measured} (README: {claim.ours}, {claim.bound})")
    return verdicts


def check(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0, or 1 if a claim fails."""
    path = paths.root() / "README.md"
    try:
        claims = read_claims(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise T1Error(f"cannot read the claims in {paths.shown(path)}: {error.strerror}") from None
    for name in arguments.experiments:
        choose("experiment", name, params.experiments())
    chosen = arguments.experiments or list(dict.fromkeys(claim.experiment for claim in claims))
    verdicts = [v for name in chosen for v in _check_run(name, [c for c in claims if c.experiment == name])]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in (PASS, FAIL, NOT_RUN))
    print(f"{len(verdicts)} claims: {counts}")
    return int(FAIL in verdicts)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("check", help="hold the README's claims against outputs/h200")
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="whose claims (default: all)")
    parser.set_defaults(command=check)
