"""README.md and docs/ keep what they say: snippets and commands run, numbers, paths, names and links hold."""

import ast
import re
import shlex

import pytest
from copies import CHECKOUT, drawn, python

from t1lib.claims import PAGE, read_claims

PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
TEXT = {path.relative_to(CHECKOUT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXT["README.md"]
SNIPPETS = [
    pytest.param(code, id=f"{page}-{number}")
    for page, text in TEXT.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), 1)
    if page == "README.md" or code.startswith("import torch")  # of docs, those that need nothing from elsewhere
]
COMMANDS = re.findall(r"^(?:python -m t1lib|make) [^#\n]+", README, re.MULTILINE)


def table(section: str) -> list[list[str]]:
    text = re.search(rf"^## {re.escape(section)}.*?\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^\| (?!---)(.*) \|$(?!\n\| ---)", text, re.MULTILINE)  # not what heads a table
    return [re.split(r" ?\| ", row) for row in rows]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs_as_printed(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), names)
    for opened in ("optimizer", "trainer"):
        if hasattr(names.get(opened), "close"):
            names[opened].close()


def test_commands_of_the_readme_are_there(command):
    assert len(table("Ten results")) == len(table("Where is")) == 10
    targets = " ".join(re.findall(r"^([a-z ]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)).split()
    told = {command.split()[1] for command in COMMANDS if command.startswith("make")} | {"lab"}
    assert {"reproduce", "test"} < told <= set(targets)
    plan = next(command for command in COMMANDS if " plan " in command)
    assert "recommended: mode slide" in command(*shlex.split(plan)[3:])


@pytest.mark.slow
def test_the_command_train_and_the_examples_of_several_processes_run_as_printed(tmp_path):
    command = next(command for command in COMMANDS if " train " in command)
    python(*shlex.split(command)[1:], cwd=tmp_path, T1_CACHE=str(tmp_path / "cache"))
    assert (tmp_path / "runs/first/metrics.csv").read_text().splitlines()[-1].startswith("200,")
    for script in ("two.py", "shards.py"):
        code = re.search(rf"```python\n(# {script}.*?)```", TEXT["docs/several-gpus.md"], re.DOTALL)[1]
        (tmp_path / script).write_text(code, encoding="utf-8")
    python("-m", "torch.distributed.run", "--nproc-per-node", "2", "two.py", cwd=tmp_path)
    told = python("-m", "torch.distributed.run", "--nproc-per-node", "2", "shards.py", cwd=tmp_path)
    found = re.findall(r"rank (\d): loss (\S+), norm of dE (\S+), dW \((\d+), 256\)", told)
    assert sorted(line[0] for line in found) == ["0", "1"] and sum(int(line[3]) for line in found) == 1001
    assert found[0][1:3] == found[1][1:3]


@pytest.mark.parametrize("row", table("Ten results"), ids=lambda row: row[2].strip("`"))
def test_a_headline_is_a_claim(row):
    """So that `check` looks at it, and test_claims.py at the reference run's number; ≥ stands before a grid's end."""
    ours = row[1].removeprefix("≥ ").split(" ")[0]
    claims = {claim.key: claim.ours.split(" ")[0] for claims in read_claims().values() for claim in claims}
    assert claims[row[2].strip("`")] == ours


@pytest.mark.parametrize("row", table("Why not"), ids=lambda row: row[0])
def test_what_is_said_of_others_stands_in_docs(row):
    """Each time, ratio and size of the table is found, with the same digits, on a page with the whole measurement."""
    measured = TEXT["docs/heads.md"] + TEXT["docs/streaming.md"] + TEXT[PAGE]
    values = re.findall(r"(\d+\.?\d*) (?:×|ms|GiB|MiB)", " ".join(row[1:3]))
    assert len(values) >= 2
    for value in values:
        assert re.search(rf"(?<![\d.]){re.escape(value)}(?![\d.]*\d)", measured), value


@pytest.mark.parametrize("row", table("Where is"), ids=lambda row: row[0])
def test_what_the_map_points_at_is_there(row):
    """The file, and in it a function or class, or a notebook's figure, of each name."""
    path, kinds = CHECKOUT / row[1].strip("`"), (ast.FunctionDef, ast.ClassDef)
    if path.suffix == ".ipynb":
        defined = {*drawn(path.stem, "figure")}
    else:
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        defined = {node.name for node in nodes if isinstance(node, kinds)}
    assert set(re.findall(r"`(\w+)`", row[2])) <= defined


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)):
        name, _, part = target.partition("#")
        path = ((CHECKOUT / page).parent / name).resolve() if name else CHECKOUT / page
        assert path.exists(), target
        if part:  # an anchor, as GitHub makes it of a heading
            headings = re.findall(r"^#+ (.*)", path.read_text("utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
            assert part in anchors, target
