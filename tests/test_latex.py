import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from copies import CHECKOUT, copy_kit, drawn
from refusals import refused

from t1lib.errors import UnavailableError
from t1lib.files import read_signed, write_signed
from t1lib.kit import latex
from t1lib.kit.style import make_table, to_latex
from t1lib.measure import manifest

needs_tex = pytest.mark.skipif(not (shutil.which("pdflatex") and shutil.which("bibtex")), reason="needs TeX")


@pytest.fixture
def outputs(smoke_run, tmp_path, monkeypatch):
    """`outputs(*experiments)`: outputs/smoke of a checkout that the test may change, with the runs of these."""

    def copied(*experiments: str) -> Path:
        runs = (f"outputs/smoke/{experiment}" for experiment in experiments)
        root = copy_kit(tmp_path / "kit with a space", "report", *runs, source=smoke_run(*experiments))
        monkeypatch.setenv("T1_ROOT", str(root))
        return root / "outputs" / "smoke"

    return copied


def text_of(pdf: Path) -> str:
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed")
    done = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, check=True)
    return " ".join(done.stdout.decode().replace("-\n", "").split())


@needs_tex
@pytest.mark.parametrize(
    ("report", "gpu", "others"),
    [
        ("t1m3", True, ()),
        pytest.param("t1m3", False, latex.BOTH, marks=pytest.mark.slow),
        pytest.param("t1m1", True, latex.BOTH, marks=pytest.mark.slow),
        pytest.param("t1m1", False, (), marks=pytest.mark.slow),
    ],
)
def test_a_report_is_built_and_complete(outputs, report, gpu, others):
    """Also on a GPU, of which it quotes other numbers, and without the experiments that both reports quote."""
    folder = outputs(report, *others)
    path = folder / report / "manifest.json"
    content = read_signed(path)
    if gpu:
        content["environment"] |= {"gpu": "GPU® & Co_1", "gpu_memory_gib": 15.9, "driver": "1.2"}
        write_signed(path, content)
    before = {path.name for path in folder.iterdir()}
    assert latex.build("smoke") == [folder / f"{report}.pdf"]
    assert {path.name for path in folder.iterdir()} == before | {f"{report}.pdf"}
    assert not list((folder.parent.parent / "report").glob("*.aux"))
    text = text_of(folder / f"{report}.pdf")
    assert "Abstract" in text and "Ruijia Yang" in text and content["commit"] in text and "??" not in text
    assert ("GPU® & Co_1" in text) is gpu and ("Training on real text" in text) is bool(others)
    key = {"t1m1": "t1m1.own.slide.wall_ms", "t1m3": "t1m3.step.chunked.wall_ms"}[report]
    assert json.loads((folder / report / "numbers.json").read_bytes())[key]["text"] in text
    assert gpu or "n/a" not in text


@needs_tex
def test_a_missing_number_fails_by_name_and_keeps_the_old_pdf(outputs):
    folder = outputs("t1m3")
    (folder / "t1m3.pdf").write_bytes(b"old")
    before = {path.name for path in folder.iterdir()}
    path = folder / "t1m3" / "numbers.tex"
    path.write_text(path.read_text().replace("{t1m3.step.full.wall_ms}", "{t1m3.other}"))
    refused(lambda: latex.build("smoke"), match=r"\n.*no result with the key t1m3\.step\.full\.wall_ms")
    assert (folder / "t1m3.pdf").read_bytes() == b"old"
    assert {path.name for path in folder.iterdir()} == before


def test_a_run_that_is_published_meanwhile_is_not_said_to_be_the_reports(outputs, monkeypatch):
    """Else its manifest would vouch for a PDF of the run before, and `check` would find nothing wrong."""
    folder = outputs("t1m3")
    (folder / "t1m3.pdf").write_bytes(b"old")
    before = manifest.read(folder / "t1m3").get("report")  # where `make reproduce` came before the tests

    def compile_slowly(place: Path, report: str, _: str) -> None:
        (place / f"{report}.pdf").write_bytes(b"of the run before")
        manifest.change(folder / report, commit="f" * 40)

    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(latex, "_compile", compile_slowly)
    refused(lambda: latex.build("smoke"), "a run changed while the report t1m3 was built")
    assert (folder / "t1m3.pdf").read_bytes() == b"old" and manifest.read(folder / "t1m3").get("report") == before


def test_a_report_is_made_of_its_sources_and_runs_alone_and_listed_once_they_are_others(outputs, monkeypatch, command):
    """Not of what is left in report/ where somebody ran TeX by hand, beside copies of other runs' files."""
    folder, made = outputs("t1m3"), []
    root, run = folder.parent.parent, folder / "t1m3"
    left = ("convergence-numbers.tex", "figures/convergence-fig1_loss.pdf", "tables/old.tex", "t1m3.log", "t1m3.pdf")
    for path in (root / "report" / name for name in left):
        path.parent.mkdir(exist_ok=True)
        path.write_text("left")

    def compile_nothing(place: Path, report: str, _: str) -> None:
        made.extend(path.relative_to(place).as_posix() for path in place.rglob("*"))
        (place / f"{report}.pdf").touch()

    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(latex, "_compile", compile_nothing)
    latex.build("smoke")
    assert {"t1m3.tex", "t1.bib", "numbers.tex", "context.tex"} <= {*made}
    assert not {*left} & {*made}
    for name in left:  # removed, as by who ran it
        (root / "report" / name).unlink()
    names = ["report/t1m3.tex", "report/t1.sty", "report/t1.bib"]
    names += [f"outputs/smoke/{name}" for name in ("t1m3/tables/table1.tex", "convergence/numbers.tex")]
    for name in names:  # of which the last was not there
        (root / "report" / "t1m1.tex").write_text("another report")
        assert manifest.other_pdf(run) is None
        (root / name).parent.mkdir(exist_ok=True)
        with (root / name).open("a") as file:
            file.write("% more")
        assert f"; t1m3.pdf was built from another {name}\n" in command("list")
        latex.build("smoke")
    manifest.replace_drawn(shutil.copytree(run, root / "drawn"), run, manifest.read(run)["made_of"])
    assert manifest.other_pdf(run) == "t1m3.pdf was not built from this run"


def test_without_tex_or_a_run_says_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match="not found: pdflatex, bibtex"):
        latex.build("h200")
    refused(lambda: latex.build("nobody"), "python -m t1lib run t1m1 t1m3 --profile nobody")


KNOWN = r"T1M[13]|T1 kit|\bD\d{1,2}\b|Qwen3-1\.7B|float(?:32|64)|December 2025"
# Commands whose argument is a key, a name or a length, not prose.
SILENT = r"\\(?:result|measured|ifmeasured|ref|label|cite|outputfigure|reproducibility|bibliography)\{[^{}]*\}"
LAYOUT = r"(?m)(?<!\\)%.*|^\\(?:documentclass|usepackage|outputtable).*|\\setlength\{[^{}]*\}\{[^{}]*\}|\\\\\[[^\]]*\]"


def typed_numbers(source: str) -> list[str]:
    return re.findall(r".*\d.*", re.sub(f"{LAYOUT}|{SILENT}|{KNOWN}", " ", source))


@pytest.mark.parametrize("report", [*latex.REPORTS, "training"])
def test_no_number_is_typed_by_hand_and_figures_and_tables_are_those_of_the_notebook_in_order(report):
    source = (CHECKOUT / "report" / f"{report}.tex").read_text(encoding="utf-8")
    assert typed_numbers(source + r"takes \result{t1m1.own.slide_over_gpu} times (D3)") == []
    assert typed_numbers(source + r"or 4.2 times \cite{t1m1}") != []
    for kind in ("figure", "table"):
        found = re.findall(rf"\\output{kind}(?:\[.*?\])?\{{([\w-]+)\}}", source)
        if report == "training":  # of several experiments, and some of what they make
            assert found and set(found) <= {f"{of}-{name}" for of in latex.BOTH for name in drawn(of, kind)}
        else:
            assert found == drawn(report, kind)


@needs_tex
def test_a_table_of_any_width_fits_plain_article_and_shows_its_texts(tmp_path):
    """A row's first text may be what LaTeX takes for the space or the star of the command that ended the row before."""
    words = "a long sentence about what was measured, where and why, which no line of a table can hold"
    wide = [{"what": words, "head": "chunked-vocabulary"} | {f"column {i} (ms)": 12345.678 * i for i in range(12)}] * 3
    texts = ["[8192, 2304]", "[2em]", "* best", "≤ 3, ≥ 1, −1, 50 % of a_b", r"\alpha & {x} #1 $"]
    tables = [(wide, 2), ([{"asked": words, "answer": words}], 2), ([{"share": 0.5}], 1), ([], 1), ([{"a": None}], 1)]
    tables += [([{"[s]": text, 4: 1.5} for text in texts], 1)]
    shown = r"\noindent\setbox0\hbox{%s}\typeout{WIDTH \the\wd0}\copy0"
    body = "\n\n".join(shown % to_latex(make_table(rows), columns) for rows, columns in tables)
    head = r"\documentclass{article}\usepackage{array,booktabs,graphicx}\begin{document}"
    (tmp_path / "paper.tex").write_text(f"{head}{body}\\end{{document}}", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout
    wide, few, narrow, *_ = (float(found) for found in re.findall(r"WIDTH ([\d.]+)pt", done.stdout))
    assert wide == pytest.approx(345, abs=0.1) and few <= 345.1 and narrow < 100
    found = text_of(tmp_path / "paper.pdf")
    assert all(text in found for text in ("[s]", *texts[:3], "≤ 3, ≥ 1", r"\alpha & {x} #1 $"))
