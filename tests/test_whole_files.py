import os
import signal
import textwrap
from pathlib import Path

import pytest
from programs import run

from hf_cgd.whole_files import whole_file, write_whole


@pytest.mark.parametrize(
    ("content", "there"),
    [("Zürich\nline\r\n", "Zürich\nline\r\n".encode()), (b"\x00\xff\n", b"\x00\xff\n"), ("", b"")],
    ids=["text", "bytes", "empty"],
)
def test_a_file_is_what_was_written_and_alone(tmp_path: Path, content: str | bytes, there: bytes) -> None:
    for _ in range(2):
        write_whole(tmp_path / "new" / "folder" / "file", content)
        assert (tmp_path / "new" / "folder" / "file").read_bytes() == there
    assert os.listdir(tmp_path / "new" / "folder") == ["file"]


@pytest.mark.parametrize("old", [None, b"old"], ids=["no file", "a file"])
def test_after_an_exception_all_is_as_it_was(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    with pytest.raises(OSError, match="disk full"), whole_file(path) as unfinished:
        unfinished.write_bytes(b"half")
        assert path.exists() == (old is not None)
        raise OSError("disk full")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == ({} if old is None else {"file": old})


def test_a_program_killed_in_mid_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    program = """
        import os, signal, sys
        from hf_cgd.whole_files import whole_file
        with whole_file(sys.argv[1]) as unfinished:
            unfinished.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    run("-c", textwrap.dedent(program), path, code=-signal.SIGKILL)
    assert path.read_text() == "old"
    # The other half of the oracle: the program had begun to write.
    assert [file.read_text() for file in tmp_path.glob("file.*.part")] == ["half"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_are_those_that_open_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "whole", "text")
        (tmp_path / "opened").write_text("text")
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("whole", "opened")}
    assert modes == {"whole": 0o640, "opened": 0o640}

    (tmp_path / "whole").chmod(0o604)
    write_whole(tmp_path / "whole", "anew")
    assert (tmp_path / "whole").stat().st_mode & 0o777 == 0o604


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_is_followed_as_open_does(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "text"


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    with whole_file(tmp_path / "file") as one, whole_file(tmp_path / "file") as other:
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"
    assert os.listdir(tmp_path) == ["file"]
