"""Invariant: whether a package is installed is found out without importing anything; a broken one is an error."""

import sys
from importlib.machinery import ModuleSpec

import pytest
from pretended import Folder

from mmgraph import ops
from mmgraph.ops.packages import import_package, is_installed

BROKEN = "raise RuntimeError('this must not be imported')\n"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders of packages, in front of the others."""
    made = [Folder(tmp_path / name) for name in ("one", "two")]
    for folder in made:
        folder.root.mkdir()
    monkeypatch.setattr(sys, "path", [*(str(folder.root) for folder in made), *sys.path])
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith("zz"):
            del sys.modules[name]


def nothing_imported():
    return not any(name.startswith("zz") for name in sys.modules)


def test_neither_the_module_nor_a_broken_parent_is_imported(folders):
    one, _ = folders
    for path in ("zz_whole/__init__.py", "zz_whole/inner/__init__.py", "zz_whole/inner/leaf.py", "zz_flat.py"):
        one.write(path, BROKEN)
    for name in ("zz_whole", "zz_whole.inner", "zz_whole.inner.leaf", "zz_flat"):
        assert is_installed(name), name
    for name in ("zz_other", "zz_whole.other", "zz_whole.other.leaf", "zz_whole.inner.other", "zz_flat.leaf"):
        assert not is_installed(name), name
    assert nothing_imported()


def test_a_module_beside_a_file_isnt_in_it(folders):
    one, _ = folders
    one.write("zz_file.py")
    one.write("zz_beside.py")
    assert not is_installed("zz_file.zz_beside")


def test_folders_without_a_file_of_their_own_may_be_nested_and_shared(folders):
    one, two = folders
    one.write("zz_shared/deep/left/leaf.py", BROKEN)
    two.write("zz_shared/deep/right/__init__.py", BROKEN)
    for name in ("zz_shared.deep.left.leaf", "zz_shared.deep.right"):
        assert is_installed(name), name
    for name in ("zz_shared", "zz_shared.deep"):  # a folder alone, as an uninstalled package may leave it
        assert not is_installed(name), name
    assert not is_installed("zz_shared.deep.right.leaf")
    assert not is_installed("zz_shared.deep.middle")
    assert nothing_imported()


def test_a_package_hides_a_later_folder_of_its_name(folders):
    """As the import does."""
    one, two = folders
    one.write("zz_taken/__init__.py")
    two.write("zz_taken/part.py")
    assert is_installed("zz_taken")
    assert not is_installed("zz_taken.part")


def test_editable_installations_are_seen(folders, tmp_path, monkeypatch):
    """Some come as a finder, and not as a folder on the path."""
    place = tmp_path / "checkout" / "zz_editable"
    Folder(place).write("leaf.py", BROKEN)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "zz_editable":
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec

    assert not is_installed("zz_editable")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert is_installed("zz_editable.leaf")
    assert not is_installed("zz_editable.other")
    assert nothing_imported()


def test_finders_of_an_older_kind_are_passed_over(folders, monkeypatch):
    """As the import does."""

    class OldFinder:
        def find_module(self, name, path=None):
            raise AssertionError("asked")

    folders[0].write("zz_flat.py")
    monkeypatch.setattr(sys, "meta_path", [OldFinder(), *sys.meta_path])
    assert is_installed("zz_flat")
    assert not is_installed("zz_other")


def test_what_isnt_installed_isnt_loaded():
    def load():
        raise AssertionError("loaded")

    assert import_package("zz_missing", load) is None
    assert import_package("zz_missing.part", load) is None


def test_what_is_installed_is_loaded(folders):
    folders[0].write("zz_good.py", "value = 3\n")

    def load():
        import zz_good

        return zz_good.value

    assert import_package("zz_good", load) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import zz_not_there\n", "ModuleNotFoundError: No module named 'zz_not_there'"),
        ("raise OSError('libcudart.so.13: cannot open')\n", "OSError: libcudart.so.13"),
        ("raise RuntimeError('undefined symbol')\n", "RuntimeError: undefined symbol"),
    ],
)
def test_what_cant_be_imported_is_broken(folders, text, words):
    folders[0].write("zz_bad.py", text)

    def load():
        import zz_bad

        return zz_bad

    with pytest.raises(ops.BrokenBackend, match=words) as caught:
        import_package("zz_bad", load)
    assert str(caught.value).startswith("zz_bad is installed but can't be imported")
    assert "reinstall it for this torch or uninstall it" in str(caught.value)
    assert caught.value.__cause__ is not None
    folders[0].write("zz_bad.py", "# mended, and longer than before so that no cached code is taken for it\n")
    assert import_package("zz_bad", load) is sys.modules["zz_bad"]
