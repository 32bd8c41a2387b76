"""What is compiled on first use: made once, kept by all that it depends on, and the last few of it."""

from __future__ import annotations

import os

import pytest

from kvcore.errors import BackendLoadError
from kvcore.kernels import images
from kvcore.kernels.images import device_source, headers_hash, kept


def writer(content=b"made"):
    """Return what makes a file, and the paths that it was asked for."""
    asked = []

    def make(path):
        asked.append(path)
        path.write_bytes(content)

    return make, asked


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_once_for_each_key(tmp_path):
    make, asked = writer()
    first = kept("image.bin", ["source", b"option"], make, tmp_path)
    assert kept("image.bin", ["source", b"option"], make, tmp_path) == first
    assert (first.read_bytes(), len(asked)) == (b"made", 1)
    second = kept("image.bin", ["sourceoption", b""], make, tmp_path)  # where a part ends is told apart
    assert second != first
    assert names(tmp_path) == sorted([first.name, second.name])


def test_the_name_of_a_file_says_what_it_is(tmp_path):
    made = kept("cuda-sm_90.cubin", [], writer()[0], tmp_path)
    assert made.name.startswith("cuda-sm_90-")
    assert made.suffix == ".cubin"
    assert kept("plain", [], writer()[0], tmp_path).suffix == ""


def test_other_headers_make_another_file(tmp_path, monkeypatch):
    include = tmp_path / "include"
    include.mkdir()
    (include / "abi.h").write_text("one")
    monkeypatch.setattr(images, "get_include", lambda: str(include))
    before, first = headers_hash(), kept("image", [], writer()[0], tmp_path)
    (include / "abi.h").write_text("two")
    assert headers_hash() != before
    assert kept("image", [], writer()[0], tmp_path) != first


def test_what_failed_leaves_nothing_behind(tmp_path):
    def make(path):
        path.write_bytes(b"half of it")
        raise BackendLoadError("the compiler refused")

    with pytest.raises(BackendLoadError, match="the compiler refused"):
        kept("image", [], make, tmp_path)
    assert names(tmp_path) == []


def test_a_name_without_content_is_made_again(tmp_path):
    first = kept("image", [], writer()[0], tmp_path)
    first.write_bytes(b"")
    assert kept("image", [], writer()[0], tmp_path).read_bytes() == b"made"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "taken").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(BackendLoadError, match=rf"cannot be kept in {tmp_path}/taken/kvcore: .*XDG_CACHE_HOME"):
        kept("image", [], writer()[0])


def test_the_files_used_last_are_kept(tmp_path):
    others = ("image-x", "image", "image-0123456789abcdef0123.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
    made = [kept("image", [str(number)], writer()[0], tmp_path, count=3) for number in range(3)]
    for number, path in enumerate(made):
        os.utime(path, (number, number))
    kept("image", ["0"], writer()[0], tmp_path, count=3)  # which is now the one used last
    newest = kept("image", ["3"], writer()[0], tmp_path, count=3)
    assert names(tmp_path) == sorted([*others, made[0].name, made[2].name, newest.name])


def test_a_source_has_every_kernel_by_its_name():
    text = device_source(
        "rotate\tkvcore::Rotate\nreduce\tkvcore::Parts<kvcore::AbsMax, 2>\n", context="ctx_x.hpp", macro="IT"
    )
    assert text.splitlines() == [
        "#include <kvcore/ctx_x.hpp>",
        "#include <kvcore/kernels.hpp>",
        "IT(rotate, kvcore::Rotate)",
        "IT(reduce, kvcore::Parts<kvcore::AbsMax, 2>)",
    ]
