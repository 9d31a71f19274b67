"""Photos come only from files on this machine; what can't be read is named, and never stops the others."""

import sys

import numpy as np
import pytest
from PIL import Image

from mmgraph.serving.errors import MissingExtraError, PhotoError
from mmgraph.serving.photos import folder_photos, packaged_photos


def test_packaged_photos_are_real_and_of_different_sizes():
    photos = packaged_photos()
    assert len(photos) >= 10
    assert len({photo.size for photo in photos}) >= 5
    assert {photo.source for photo in photos} == {"skimage", "sklearn"}
    for photo in photos:
        assert photo.pixels.dtype == np.uint8
        assert photo.pixels.shape[2:] == (3,)
        assert photo.pixels.std() > 10, photo.name
    again = packaged_photos(3)
    assert [p.name for p in again] == [p.name for p in photos[:3]]
    assert np.array_equal(again[0].pixels, photos[0].pixels)


def test_reading_photos_imports_neither_package(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] in ("skimage", "sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    packaged_photos(4)
    assert not {"skimage", "sklearn"} & set(sys.modules)


@pytest.mark.parametrize(("module", "project"), [("skimage", "scikit-image"), ("sklearn", "scikit-learn")])
def test_a_missing_package_names_the_extra(monkeypatch, module, project):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"{project}.*mmgraph\[hf,photos\]"):
            packaged_photos()
    assert packaged_photos(1)


def test_folder_reads_by_name_and_passes_over_what_it_cannot_read(tmp_path):
    Image.new("L", (7, 5), 9).save(tmp_path / "b.png")
    Image.new("RGBA", (4, 6), (1, 2, 3, 4)).save(tmp_path / "a.png")
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    (tmp_path / "notes.txt").write_text("no photo either")
    (tmp_path / "folder.png").mkdir()
    with pytest.warns(UserWarning, match=r"broken\.jpg.*passed over") as caught:
        photos = folder_photos(tmp_path)
    assert len(caught) == 1
    assert [(p.name, p.size) for p in photos] == [("a.png", (4, 6)), ("b.png", (7, 5))]
    assert photos[0].pixels[0, 0].tolist() == [1, 2, 3]
    assert len(folder_photos(tmp_path, 1)) == 1


def test_a_truncated_photo_is_passed_over(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match=r"cut\.png"):
        assert [p.name for p in folder_photos(tmp_path)] == ["whole.png"]


def test_nothing_readable_is_an_error(tmp_path):
    with pytest.raises(PhotoError, match="not a folder"):
        folder_photos(tmp_path / "absent")
    with pytest.raises(PhotoError, match="no photo could be read"):
        folder_photos(tmp_path)
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(PhotoError, match="1 file"):
        folder_photos(tmp_path)
    Image.new("RGB", (3, 3)).save(tmp_path / "y.png")
    with pytest.warns(UserWarning, match=r"x\.png"):
        assert len(folder_photos(tmp_path)) == 1
