"""Rows are known again by their content, whatever the file is called and however it is stored."""

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, Value
from PIL import Image as Picture

from hf_cgd.data.row_digests import FILE, RowDigests, digests_of_images, digests_of_texts


def test_texts_are_the_same_up_to_spaces_and_pairs_are_no_single_texts() -> None:
    one = digests_of_texts(Dataset.from_dict({"a": ["x y", "y", "Z"], "b": ["", "z", ""]}), ["a"])
    two = digests_of_texts(Dataset.from_dict({"c": ["Z", "z", " x\n  y "]}), ["c"])
    assert (one[:, None] == two).tolist() == [[False, False, True], [False, False, False], [True, False, False]]
    pairs = digests_of_texts(Dataset.from_dict({"a": ["x", "x y"], "b": ["y z", "z"]}), ["a", "b"])
    assert len({*one.tolist(), *pairs.tolist()}) == 5


def test_an_image_is_the_same_in_a_file_and_inside_of_a_table(tmp_path: Path) -> None:
    """Of large files three parts are read: a change in any of them counts."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(4):
        pixels = generator.integers(0, 256, (90, 90, 3)).astype(np.uint8)
        Picture.fromarray(pixels).save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    content = [Path(path).read_bytes() for path in paths]
    assert min(map(len, content)) > 5 * 4096
    for place in (5, len(content[0]) // 2, len(content[0]) - 5):
        content.append(content[0][:place] + b"?" + content[0][place + 1 :])
    features = Features(image=Image(decode=True), n=Value("int64"))
    files = Dataset.from_dict({"image": paths, "n": range(4)}, features=features)
    inside = Dataset.from_dict(
        {"image": [{"bytes": one, "path": None} for one in content], "n": range(7)}, features=features
    )
    inside = inside.select([3, 1, 2, 0, 4, 5, 6])
    by_file, by_bytes = digests_of_images(files, "image"), digests_of_images(inside, "image")
    assert by_file[[3, 1, 2, 0]].tolist() == by_bytes[:4].tolist() and len(set(by_bytes.tolist())) == 7


def test_what_was_written_is_read(tmp_path: Path) -> None:
    known = RowDigests.of(np.array([5, 2, 2, 2**64 - 1], dtype=np.uint64))
    assert RowDigests.load(tmp_path) is None
    known.save(tmp_path)
    assert FILE.startswith("_"), "the Trainer pushes all other names to the Hub"
    found = RowDigests.load(tmp_path)
    assert found is not None and found.digests.tolist() == [2, 5, 2**64 - 1] and found.bound == 2**64 - 1
    looked_up, seen = found.found_in(np.array([1, 2, 5, 5], dtype=np.uint64))
    assert looked_up.all() and seen.tolist() == [False, True, True, True]


def test_a_part_of_the_digests_tells_the_share() -> None:
    """30 % of 20,000 rows are among 100,000 of training, of which a tenth is kept."""
    rows = Dataset.from_dict({"t": [f"text {number}" for number in range(114_000)]})
    digests = digests_of_texts(rows, ["t"])
    known = RowDigests.of(digests[:100_000]).at_most(10_000)
    assert known.digests.tolist() == sorted(set(digests[:100_000].tolist()))[:10_000]
    looked_up, seen = known.found_in(digests[94_000:])
    true = np.arange(94_000, 114_000) < 100_000
    assert not (seen & ~true).any() and (seen == (true & looked_up)).all()
    # Of some 2,000 looked up; the bound is five standard deviations.
    share = seen.sum() / looked_up.sum()
    assert 1_700 < looked_up.sum() < 2_300 and share == pytest.approx(0.3, abs=5 * np.sqrt(0.3 * 0.7 / 2_000))
