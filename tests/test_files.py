"""Writing files and folders: afterwards they are complete or unchanged, and a failing disk gives a single error."""

import pytest

from t1lib.errors import T1Error
from t1lib.files import locked, whole, write_json, writing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_fails_half_way_is_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"ü": 1})
    with pytest.raises(T1Error, match=r"^cannot write .*a\.json: No space left$"), whole(path) as partial:
        partial.write_text("half", encoding="utf-8")
        raise OSError(28, "No space left")
    assert path.read_text(encoding="utf-8") == '{\n "ü": 1\n}\n'
    assert names(tmp_path) == ["a.json"]


def test_a_folder_takes_the_place_of_the_old_one_and_of_what_was_left_half(tmp_path):
    path = tmp_path / "model"
    for content in ("old", "new"):
        (tmp_path / ".model.partial").mkdir()
        (tmp_path / ".model.partial" / "left").touch()
        with whole(path) as partial:
            partial.mkdir()
            (partial / content).touch()
        assert names(path) == [content] and names(tmp_path) == ["model"]


def test_what_is_not_the_disks_fault_is_raised_as_it_is(tmp_path):
    with pytest.raises(KeyError), whole(tmp_path / "a") as partial:
        partial.touch()
        raise KeyError("b")
    assert names(tmp_path) == []
    with pytest.raises(T1Error, match="Permission denied"), writing(tmp_path / "a"):
        try:
            raise PermissionError(13, "Permission denied")
        finally:
            raise RuntimeError("a library's own, over the disk's")
    with pytest.raises(T1Error, match=r"No space left on device \(os error 28\)"), writing(tmp_path / "a"):
        raise RuntimeError("No space left on device (os error 28)")


def test_several_writers_do_not_meet(tmp_path):
    path = tmp_path / "cache.json"
    with whole(path, ".1") as one, whole(path, ".2") as other:
        assert one != other
        for partial in (one, other):
            partial.write_text("the same", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "the same" and names(tmp_path) == ["cache.json"]


def test_a_lock_is_one_processs(tmp_path):
    path = tmp_path / "new" / ".lock"
    with locked(path, "first"), pytest.raises(T1Error, match="taken"), locked(path, "taken"):
        pass
    with locked(path, "free again"):
        pass
