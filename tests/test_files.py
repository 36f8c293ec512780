"""Writing files and folders: afterwards they are complete or unchanged, and a failing disk gives a single error."""

import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
from copies import names
from refusals import refused

from t1lib.errors import T1Error
from t1lib.files import cache_folder, read_signed, recover, signed, whole, write_signed


def test_a_file_or_folder_is_as_it_was_until_the_new_one_is_whole(tmp_path):
    path, model, own = tmp_path / "a.json", tmp_path / "model", tmp_path / ".a.json.old"
    own.touch()
    write_signed(path, {"ü": 1})
    with pytest.raises(T1Error, match=r"^cannot write .*a\.json: No space left$"), whole(path) as partial:
        partial.write_text("half", encoding="utf-8")
        raise OSError(28, "No space left")
    assert path.read_text(encoding="utf-8").startswith('{\n "ü": 1,\n') and names(tmp_path) == [own.name, "a.json"]
    for content in ("old", "new"):
        (tmp_path / ".model.partial").mkdir()  # left half
        (tmp_path / ".model.partial" / "left").touch()
        with whole(model) as partial:
            partial.mkdir()
            (partial / content).touch()
        assert names(model) == [content] and names(tmp_path) == [own.name, "a.json", "model"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_is_whole_if_it_cannot_be_replaced_or_the_process_is_killed_meanwhile(tmp_path, monkeypatch, linked):
    model, unlink, calls = tmp_path / "model", os.unlink, []

    def killed(*arguments, **options):
        if len(calls) == 1:
            raise KeyboardInterrupt
        unlink(*arguments, **options)  # or raises: not all that is removed is there
        calls.append(1)

    def written(*files):
        with whole(model) as partial:
            partial.mkdir()
            for name in files:
                (partial / name).touch()

    written("a", "b")
    if linked:
        model.symlink_to(model.rename(tmp_path / "elsewhere"))
    refused_by_windows = [DEFAULT, OSError(13, "is open"), DEFAULT]
    for ends, error in (
        ([KeyboardInterrupt, DEFAULT], KeyboardInterrupt),
        (refused_by_windows, T1Error),
        ([DEFAULT, SystemExit, SystemExit], SystemExit),  # killed: the second one cannot clean up, either
    ):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(os, "replace", Mock(wraps=os.replace, side_effect=ends))
            written("new")
        if error is SystemExit:
            recover(model)
        assert names(model) == ["a", "b"] and names(tmp_path) == ["elsewhere", "model"][not linked :]
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "unlink", killed)
        written("a", "b")
    assert names(model) == ["a", "b"] and len(calls) == 1
    written("new")
    assert names(model) == ["new"]


def test_a_file_with_its_checksum_is_as_it_was_written_or_refused(tmp_path):
    path, content = tmp_path / "a.json", {"ü": [1, 2.5, None], "deep": {10: "x", 9: "y"}}
    write_signed(path, content)
    assert read_signed(path) == {"ü": [1, 2.5, None], "deep": {"10": "x", "9": "y"}}
    text = signed(content).decode()
    for spoilt in (text.replace("2.5", "2.75"), text[:-3], "", "[]", "null", "{}", "[" * 100_000, '{"sha256": 1}'):
        path.write_text(spoilt, encoding="utf-8")
        refused(lambda: read_signed(path), "a.json is damaged")
    path.unlink()
    refused(lambda: read_signed(path), match=r"cannot read .*a\.json: No such file")


def test_the_cache_needs_a_home_only_if_nothing_else_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    for name in ("T1_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    refused(cache_folder, "this user has no home folder to keep a cache in; name one in T1_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "t1kit"
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
