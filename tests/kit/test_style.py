"""The style of the figures does not depend on what an earlier environment left in the user's cache."""

from pathlib import Path

import matplotlib
from matplotlib import font_manager

from t1lib.kit.style import style


def test_a_list_of_fonts_from_an_environment_that_is_gone_does_no_harm(monkeypatch):
    brought = Path(matplotlib.get_data_path())
    known = font_manager.fontManager.ttflist
    others = [font for font in known if brought not in Path(font.fname).parents]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", others)
    with style():
        found = [font_manager.findfont(name, fallback_to_default=False) for name in ("STIXGeneral", "DejaVu Sans")]
    assert all(brought in Path(path).parents for path in found)
    again = len(font_manager.fontManager.ttflist)
    with style():
        assert len(font_manager.fontManager.ttflist) == again  # added once
