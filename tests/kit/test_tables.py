"""Tables fit the page of a plain article, and their columns have a unit that suits what they hold."""

import re
import shutil
import subprocess

import pytest

from t1lib.kit.tables import make_table, to_latex

WORDS = "a long sentence about what was measured, where and why, which no line of a table can hold"


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs LaTeX")
def test_a_wide_table_fits_plain_article(tmp_path):
    wide = [{"what": WORDS, "head": "chunked-vocabulary"} | {f"column {i} (ms)": 12345.678 * i for i in range(12)}] * 3
    few = [{"asked": WORDS, "answer": WORDS}]
    narrow = [{"head": "fused", "share": 0.5}]
    for name, rows, texts in (("wide", wide, 2), ("few", few, 2), ("narrow", narrow, 1)):
        (tmp_path / f"{name}.tex").write_text(to_latex(make_table(rows), texts))
    body = "\n\n".join(rf"\noindent\setbox0\hbox{{\input{{{name}}}}}\typeout{{WIDTH \the\wd0}}\copy0" for name in
                       ("wide", "few", "narrow"))  # fmt: skip
    packages = r"\usepackage{array,booktabs,graphicx}"
    (tmp_path / "paper.tex").write_text(rf"\documentclass{{article}}{packages}\begin{{document}}{body}\end{{document}}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout
    wide, few, narrow = (float(found) for found in re.findall(r"WIDTH ([\d.]+)pt", done.stdout))
    assert wide == pytest.approx(345, abs=0.1) and few <= 345.1 and narrow < 100


def test_small_memory_is_shown_in_mib_column_by_column():
    rows = [{"mode": "gpu", "device (GiB)": 0.0078125, "host (GiB)": 0.25, "none (GiB)": None},
            {"mode": "slide", "device (GiB)": float("nan"), "host (GiB)": 0.5, "none (GiB)": None}]  # fmt: skip
    frame = make_table(rows)
    assert list(frame.columns) == ["mode", "device (MiB)", "host (GiB)", "none (GiB)"]
    assert frame["device (MiB)"].tolist() == ["8.00", "–"] and frame["host (GiB)"].tolist() == ["0.250", "0.500"]
