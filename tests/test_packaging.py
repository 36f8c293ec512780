"""The wheel, and what it asks for: heads, streaming, `plan` and `train` work without the notebooks' packages.

The tests run Python with two folders on its path besides its own library: the wheel's files, and links to just those
installed packages that its dependencies bring, as in an environment with nothing else.
"""

import ast
import importlib.metadata as metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = {  # imported where a user has them: peers that are measured, a shard of a dataset, a cell of a notebook
    "IPython", "cut_cross_entropy", "liger_kernel", "pyarrow", "quack", "trl",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The folder with the wheel's files, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "tree").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "t1lib"):
        (folder / "tree" / name).symlink_to(ROOT / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "tree"], check=True, timeout=120)
    with zipfile.ZipFile(*folder.glob("*.whl")) as archive:
        archive.extractall(folder / "files")
    return folder / "files"


def requirements(wheel: Path) -> list[Requirement]:
    """All that the wheel requires, its extras' requirements included."""
    (found,) = metadata.distributions(name="t1lib", path=[str(wheel)])
    return list(map(Requirement, found.requires))


def brought(asked: list[Requirement]) -> dict[str, metadata.Distribution]:
    """The installed distributions that requirements bring here, with those that they require in turn."""
    found, seen, asked = {}, set(), list(asked)
    while asked:
        one = asked.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        found[one.name.lower()] = metadata.distribution(one.name)
        further = map(Requirement, found[one.name.lower()].requires or ())
        asked += [other for other in further if applies(other, *one.extras)]
    return found


def applies(requirement: Requirement, *extras: str) -> bool:
    """Whether it is required here, with these extras."""
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": name}) for name in ("", *extras))


@pytest.fixture(scope="module")
def plain(wheel, tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python in an environment with the wheel and its dependencies alone."""
    site = tmp_path_factory.mktemp("site")
    links: dict[str, Path] = {}
    for distribution in brought([one for one in requirements(wheel) if applies(one)]).values():
        names = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        links |= {name: Path(distribution.locate_file(name)) for name in names}
    for name, target in links.items():
        (site / name).symlink_to(target)

    def python(*arguments: str, cwd: Path = site) -> subprocess.CompletedProcess:
        environment = {"PYTHONPATH": os.pathsep.join(map(str, (wheel, site))), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"T1_CACHE": str(cwd / "cache"), "HOME": str(cwd)}
        command = [sys.executable, "-S", *arguments]  # -S: without the packages of the environment that runs this test
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return python


def succeeds(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(folder: Path) -> set[str]:
    """The packages from elsewhere that the code below `folder` imports, at any place."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"t1lib"}


def test_what_the_code_imports_is_declared(wheel):
    homes = metadata.packages_distributions()
    declared = {one.name.lower() for one in requirements(wheel) if 'extra == "dev"' not in str(one.marker)}
    needed = {name: {home.lower() for home in homes.get(name, [name])} for name in imported(wheel) - OPTIONAL}
    assert [name for name, distributions in needed.items() if not declared & distributions] == []


def test_the_wheel_holds_the_package_alone(wheel):
    asked = brought([one for one in requirements(wheel) if applies(one)])
    assert not {"jupyterlab", "papermill", "matplotlib", "seaborn", "pandas"} & asked.keys()
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == {"t1lib"}
    ours = {path.relative_to(ROOT) for path in (ROOT / "t1lib").rglob("*") if "__pycache__" not in path.parts}
    assert all((wheel / path).exists() for path in ours)


IMPORTED = """
import sys, t1lib
assert "torch" not in sys.modules, "t1lib alone"
from t1lib.heads import linear_cross_entropy, patch_head
import torch
for name in ("transformers", "matplotlib", "pandas", "pydantic"):
    assert name not in sys.modules, name
torch.manual_seed(0)
e, w, target = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16), torch.randint(40, (6,))
expected = torch.nn.functional.cross_entropy(e @ w.T, target)
for head in ("full", "chunked", "fused"):
    torch.testing.assert_close(linear_cross_entropy(e, w, target, head=head), expected)
import t1lib.train
for name in ("matplotlib", "pandas"):
    assert name not in sys.modules, name
print(t1lib.__file__)
"""


def test_heads_and_streaming_are_imported_without_the_rest(wheel):
    """In this environment, which has all of it."""
    script = f"import sys; sys.path.insert(0, {str(wheel)!r})\n{IMPORTED}"
    run = subprocess.run([sys.executable, "-c", script], cwd=wheel.parent, capture_output=True, text=True, timeout=300)
    assert Path(succeeds(run).strip()) == wheel / "t1lib/__init__.py"


@pytest.mark.slow
def test_train_works_in_the_plain_installation(plain, tmp_path):
    (tmp_path / "text.txt").write_text("A short text about nothing. " * 200)
    small = ["--vocabulary", "270", "--seq", "16", "--batch", "2", "--steps", "2", "--eval-rows", "2"]
    given = ["--model", "tiny", "--mode", "slide", "--head", "chunked", "--data", "text.txt", "--out", "run", *small]
    assert "no plot: " in succeeds(plain("-m", "t1lib", "train", *given, cwd=tmp_path))
    assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) == 3


def test_help_needs_nothing_but_the_package(wheel):
    for command in ((), ("train",)):
        arguments = [sys.executable, "-S", "-m", "t1lib", *command, "--help"]
        run = subprocess.run(arguments, cwd=wheel, env={}, capture_output=True, text=True, timeout=60)
        assert "usage: python -m t1lib" in succeeds(run)


def test_what_needs_the_kit_says_so(plain):
    done = plain("-m", "t1lib", "run")
    assert done.returncode == 2 and done.stderr.startswith("error: `run` needs ")
    assert ".[kit]" in done.stderr and len(done.stderr) < 300
