import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from t1lib.errors import T1Error, UnavailableError
from t1lib.files import read_signed, write_signed
from t1lib.kit import latex

pytest_plugins = ["smoke_run"]

REPORT = Path(__file__).resolve().parent.parent / "report"
needs_tex = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("pdflatex", "bibtex")), reason="TeX is not installed"
)


@pytest.fixture
def outputs(smoke_outputs, tmp_path, monkeypatch):
    """outputs/smoke of a checkout that the test may change."""
    root = tmp_path / "kit with a space"
    shutil.copytree(smoke_outputs, root)
    monkeypatch.setenv("T1_ROOT", str(root))
    return root / "outputs" / "smoke"


def only(outputs: Path, report: str) -> None:
    for other in set(latex.REPORTS) - {report}:
        shutil.rmtree(outputs / other)


def text_of(pdf: Path) -> str:
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed")
    done = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, check=True)
    return " ".join(done.stdout.decode().replace("-\n", "").split())


@needs_tex
def test_both_reports_are_built_and_complete(outputs):
    before = {path.name for path in outputs.iterdir()}
    built = latex.build("smoke")
    assert built == [outputs / "t1m1.pdf", outputs / "t1m3.pdf"]
    assert {path.name for path in outputs.iterdir()} == before | {"t1m1.pdf", "t1m3.pdf"}
    assert not list((outputs.parent.parent / "report").glob("*.aux"))
    for path in built:
        text = text_of(path)
        manifest = json.loads((outputs / path.stem / "manifest.json").read_text())
        numbers = json.loads((outputs / path.stem / "numbers.json").read_text())
        for expected in ("Abstract", "Contributions", "Limitations", "Reproducibility", "Ruijia Yang"):
            assert expected in text
        assert manifest["commit"] in text
        assert "??" not in text and "n/a" not in text
        key = {"t1m1": "t1m1.own.slide.wall_ms", "t1m3": "t1m3.step.chunked.wall_ms"}[path.stem]
        assert numbers[key]["text"] in text


@needs_tex
def test_same_outputs_give_the_same_bytes(outputs):
    only(outputs, "t1m3")
    first = latex.build("smoke")[0].read_bytes()
    assert latex.build("smoke")[0].read_bytes() == first


@needs_tex
@pytest.mark.parametrize("report", latex.REPORTS)
def test_every_number_quoted_of_a_gpu_exists(outputs, report):
    only(outputs, report)
    path = outputs / report / "manifest.json"
    content = read_signed(path)
    content["environment"] |= {"gpu": "GPU® & Co_1", "gpu_memory_gib": 15.9, "driver": "1.2"}
    write_signed(path, content)
    assert "GPU® & Co_1" in text_of(latex.build("smoke")[0])


@needs_tex
def test_variants_without_a_number_are_left_out_of_the_prose(outputs):
    only(outputs, "t1m1")
    path = outputs / "t1m1" / "numbers.tex"
    lost = re.sub(r"(?m)^(\\setresult\{t1m1\.real\..+?\}).*?(\{\w*\})$", r"\1{n/a}\2", path.read_text())
    path.write_text(lost.replace("{t1m1.real.tokens}{n/a}", "{t1m1.real.tokens}{9}"))
    text = text_of(latex.build("smoke")[0])
    assert "One of gpu and slide has no time here" in text
    assert "n/a times" not in text


@needs_tex
def test_a_missing_number_fails_by_name_and_keeps_the_old_pdf(outputs):
    only(outputs, "t1m3")
    (outputs / "t1m3.pdf").write_bytes(b"old")
    before = {path.name for path in outputs.iterdir()}
    path = outputs / "t1m3" / "numbers.tex"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "{t1m3.step.full.wall_ms}" not in line))
    with pytest.raises(T1Error, match=r"no result with the key t1m3\.step\.full\.wall_ms") as error:
        latex.build("smoke")
    assert len(str(error.value).splitlines()) == 2
    assert (outputs / "t1m3.pdf").read_bytes() == b"old"
    assert {path.name for path in outputs.iterdir()} == before


@needs_tex
def test_an_undefined_reference_fails(outputs):
    only(outputs, "t1m3")
    path = outputs.parent.parent / "report" / "t1m3.tex"
    path.write_text(path.read_text().replace(r"\ref{fig:peak}", r"\ref{fig:nowhere}"))
    with pytest.raises(T1Error, match="fig:nowhere"):
        latex.build("smoke")


@needs_tex
def test_builds_without_latexmk(outputs, monkeypatch):
    only(outputs, "t1m3")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "latexmk" else which(name))
    assert "??" not in text_of(latex.build("smoke")[0])


def test_without_tex_says_what_to_install(outputs, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match="pdflatex and bibtex was not found") as error:
        latex.build("smoke")
    for system in ("apt-get install", "macOS", "Windows"):
        assert system in str(error.value)


def test_without_a_run_names_the_command(checkout):
    with pytest.raises(T1Error, match="python -m t1lib run t1m1 t1m3 --profile smoke"):
        latex.build("smoke")


def test_context_escapes_and_shows_settings_as_written(tmp_path):
    content = {
        "experiment": "t1m1", "profile": "smoke", "commit": "abc", "dirty": True, "seconds": 1.5,
        "started": "2026-11-21T09:37:32+00:00", "environment": {"torch": "2.13", "cpu": "A_B"},
        "parameters": {"lr": 1e-4, "token_counts": [32, 64], "together": False, "batch": 16384},
    }  # fmt: skip
    latex.write_context(content, tmp_path / "context.tex")
    text = (tmp_path / "context.tex").read_text()
    for line in (
        r"\setresult{run.device}{A\_B}{}", r"\setresult{run.date}{2026-11-21}{}", r"\setresult{run.dirty}{yes}{}",
        r"\setresult{param.lr}{0.0001}{}", r"\setresult{param.token_counts}{32, 64}{}", r"\newif\ifgpu\gpufalse",
        r"\setresult{param.together}{no}{}", r"\setresult{param.batch}{16384}{}", r"\texttt{token\_counts}",
    ):  # fmt: skip
        assert line in text


KNOWN = r"T1M[13]|T1 kit|\bD\d{1,2}\b|Qwen3-1\.7B|float(?:32|64)|December 2025"
# Commands whose argument is a key, a name or a length, not prose.
SILENT = r"\\(?:result|measured|ifmeasured|ref|label|cite|outputfigure|reproducibility|bibliography)\{[^{}]*\}"
LAYOUT = r"(?m)(?<!\\)%.*|^\\(?:documentclass|usepackage|outputtable).*|\\setlength\{[^{}]*\}\{[^{}]*\}|\\\\\[[^\]]*\]"


def typed_numbers(source: str) -> list[str]:
    for pattern in (LAYOUT, SILENT, KNOWN):
        source = re.sub(pattern, " ", source)
    return re.findall(r".*\d.*", source)


@pytest.mark.parametrize("report", [*latex.REPORTS, "training"])
def test_no_number_is_typed_by_hand(report):
    assert typed_numbers((REPORT / f"{report}.tex").read_text(encoding="utf-8")) == []


def test_a_typed_number_would_be_found():
    source = r"takes \result{t1m1.own.slide_over_gpu} times (D3)" + "\n" + r"or 4.2 times \cite{t1m1}"
    assert typed_numbers(source) == ["or 4.2 times  "]


@pytest.mark.parametrize("report", latex.REPORTS)
def test_every_figure_and_table_is_there_in_order_and_referred_to(report):
    source = (REPORT / f"{report}.tex").read_text(encoding="utf-8")
    notebook = (REPORT.parent / "notebooks" / f"{report}.ipynb").read_text(encoding="utf-8")
    assert re.findall(r"\\outputfigure\{(\w+)\}", source) == re.findall(r'run\.(?:figure|draw)\(\\"(\w+)', notebook)
    assert re.findall(r"\\outputtable(?:\[.*?\])?\{(\w+)\}", source) == re.findall(r'run\.table\(\\"(\w+)', notebook)
    for label in re.findall(r"\\label\{((?:fig|tab):\w+)\}", source):
        assert rf"\ref{{{label}}}" in source


def test_what_both_reports_quote_is_there_and_referred_to():
    source = (REPORT / "training.tex").read_text(encoding="utf-8")
    for command, suffix in (("figure", "figures/{}.pdf"), ("table", "tables/{}.tex")):
        for experiment, name in re.findall(rf"\\output{command}\{{(\w+)-(\w+)\}}", source):
            assert (
                experiment in latex.BOTH
                and (REPORT.parent / "outputs" / "h200" / experiment / suffix.format(name)).is_file()
            )
    for label in re.findall(r"\\label\{((?:fig|tab):[\w-]+)\}", source):
        assert rf"\ref{{{label}}}" in source


@needs_tex
def test_a_report_is_built_without_the_experiments_that_both_quote(outputs):
    assert "Training on real text" in text_of(latex.build("smoke")[0])
    for name in latex.BOTH:
        shutil.rmtree(outputs / name)
    assert "Training on real text" not in text_of(latex.build("smoke")[0])
