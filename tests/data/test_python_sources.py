"""The default corpus: which files of the interpreter are read."""

import sysconfig

import pytest

from mtpjax.data import python_sources


def test_the_standard_library_is_found_without_installed_packages():
    files = python_sources.list_python_sources()
    names = [file.relative_to(sysconfig.get_path("stdlib")).as_posix() for file in files]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)
    assert files == sorted(files)


def test_unusable_files_and_links_out_of_the_folder_are_left_out(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside.py"
    for name, content in {
        "b/good.py": b"x = 1\n", "a.py": b"y = 2\n", "empty.py": b"", "nul.py": b"a\0", "latin.py": b"\xe4\n",
        "readme.txt": b"text", "site-packages/p.py": b"z\n",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    outside.write_text("secret\n")
    (folder / "out.py").symlink_to(outside)
    (folder / "same.py").symlink_to(folder / "a.py")
    (folder / "dangling.py").symlink_to(folder / "nothing.py")
    assert python_sources._list_sources_under(folder) == [folder / "a.py", folder / "b/good.py"]


def test_a_stripped_standard_library_is_made_up_for_by_installed_packages(tmp_path, monkeypatch):
    for name in ("stdlib/os.py", "packages/one/core.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("pass\n")
    folders = {"stdlib": "stdlib", "purelib": "packages", "platlib": "packages"}
    monkeypatch.setattr(python_sources.sysconfig, "get_path", lambda name: str(tmp_path / folders[name]))
    monkeypatch.setattr(python_sources.site, "getsitepackages", lambda: [str(tmp_path / "packages")])
    assert python_sources.list_python_sources() == [tmp_path / "stdlib/os.py", tmp_path / "packages/one/core.py"]


def test_an_interpreter_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(python_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(python_sources.site, "getsitepackages", lambda: [])
    with pytest.raises(FileNotFoundError, match="no Python sources under"):
        python_sources.list_python_sources()
