"""The wheel, and what it asks for: heads, streaming, `plan` and `train` work without the notebooks' packages."""

import ast
import importlib.metadata as metadata
import os
import sys
from pathlib import Path

import pytest
from copies import CHECKOUT, python
from packaging.requirements import Requirement

OPTIONAL = {  # imported where a user has them: peers that are measured, a cell of a notebook
    "IPython", "cut_cross_entropy", "liger_kernel", "quack", "trl",
}  # fmt: skip
EXTRA = {  # what only the extras bring: modules
    "IPython", "accelerate", "ipykernel", "ipywidgets", "jupyter_client", "jupyter_core", "jupyterlab", "matplotlib",
    "nbclient", "nbformat", "pandas", "papermill", "peft", "pydantic", "seaborn", "traitlets",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The folder with the wheel's files, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "tree").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "t1lib"):
        (folder / "tree" / name).symlink_to(CHECKOUT / name)
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--no-compile"]
    python("-m", "pip", "install", *options, "--target", folder / "files", folder / "tree", cwd=folder)
    return folder / "files"


def required(wheel: Path, extra: str = "") -> set[str]:
    """The distributions that the wheel requires on Linux, with this extra."""
    (found,) = metadata.distributions(name="t1lib", path=[str(wheel)])
    linux = {"platform_system": "Linux", "platform_machine": "x86_64", "extra": extra}
    asked = map(Requirement, found.requires)
    return {one.name.lower() for one in asked if one.marker is None or one.marker.evaluate(linux)}


def installed(wheel: Path, *arguments: str, cwd: Path, **more: int) -> str:
    """`python` with the wheel's files on its path, as if what only the extras bring were not installed."""
    (cwd / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(EXTRA)}))\n")
    return python(*arguments, cwd=cwd, PYTHONPATH=f"{wheel}{os.pathsep}{cwd}", T1_CACHE=str(cwd / "cache"), **more)


def test_the_wheel_holds_the_package_alone_and_declares_what_it_imports(wheel):
    imported, declared, homes = set(), required(wheel, "kit"), metadata.packages_distributions()
    for path in wheel.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    for name in imported - set(sys.stdlib_module_names) - {"t1lib"} - OPTIONAL:
        assert {home.lower() for home in homes.get(name, [name])} & declared, name
    assert not {"jupyterlab", "papermill", "matplotlib", "seaborn", "pandas"} & required(wheel)
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == {"t1lib"}
    ours = {path.relative_to(CHECKOUT) for path in (CHECKOUT / "t1lib").rglob("*") if "__pycache__" not in path.parts}
    assert all((wheel / path).exists() for path in ours)


IMPORTED = """
import sys, t1lib
assert "torch" not in sys.modules, "t1lib alone"
from t1lib.heads import linear_cross_entropy, patch_head
import torch
assert not {"transformers", "torch._dynamo"} & sys.modules.keys()  # each takes seconds
torch.manual_seed(0)
e, w, target = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16), torch.randint(40, (6,))
expected = torch.nn.functional.cross_entropy(e @ w.T, target)
for head in ("full", "chunked", "fused"):
    torch.testing.assert_close(linear_cross_entropy(e, w, target, head=head), expected)
from t1lib.train import OptimizerSpec, build_model, make_trainer
model = build_model("tiny", hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
trainer = make_trainer(model, "slide", optimizer=OptimizerSpec("adamw"))
trainer.step({"input_ids": torch.ones(1, 4, dtype=torch.long)})
print(t1lib.__file__)  # the interpreter waits for updates that still run
"""


def test_heads_and_streaming_work_without_the_rest(wheel, tmp_path):
    assert installed(wheel, "-c", IMPORTED, cwd=tmp_path) == f"{wheel}/t1lib/__init__.py\n"
    for command in ((), ("train",)):  # help needs nothing but the package
        assert "usage: python -m t1lib" in installed(wheel, "-S", "-m", "t1lib", *command, "--help", cwd=tmp_path)
    told = installed(wheel, "-m", "t1lib", "run", cwd=tmp_path, code=2)
    assert told.startswith("error: `run` needs ") and ".[kit]" in told and len(told) < 300


@pytest.mark.slow
def test_train_works_without_the_rest(wheel, tmp_path):
    (tmp_path / "text.txt").write_text("A short text about nothing. " * 200)
    small = ["--vocabulary", "270", "--seq", "16", "--batch", "2", "--steps", "2", "--eval-rows", "2"]
    given = ["--model", "tiny", "--mode", "slide", "--head", "chunked", "--data", "text.txt", "--out", "run", *small]
    assert "step 2/2  loss" in installed(wheel, "-m", "t1lib", "train", *given, cwd=tmp_path)
    assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) == 3
