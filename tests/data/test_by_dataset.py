"""What is kept of a data set goes with it; a list is looked at each time."""

import gc

from datasets import Dataset

from hf_cgd.data.by_dataset import ByDataset


def test_each_data_set_is_looked_at_once_and_equal_ones_are_two() -> None:
    asked: list[int] = []
    sizes: ByDataset[int] = ByDataset()

    def size(dataset: Dataset) -> int:
        asked.append(len(dataset))
        return len(dataset)

    first, second = (Dataset.from_dict({"x": [1, 2]}) for _ in range(2))
    assert [sizes.of(one, size) for one in (first, second, first, second)] == [2, 2, 2, 2]
    assert asked == [2, 2]


def test_another_one_at_the_same_place_in_memory_is_looked_at() -> None:
    lengths: ByDataset[int] = ByDataset()
    found = []
    for length in range(1, 30):
        dataset = Dataset.from_dict({"x": list(range(length))})
        found.append(lengths.of(dataset, len))
        del dataset
        gc.collect()
    assert found == list(range(1, 30))


def test_a_list_of_rows_is_looked_at_each_time() -> None:
    rows = [{"x": 1}]
    lengths: ByDataset[int] = ByDataset()
    assert lengths.of(rows, len) == 1
    rows.append({"x": 2})
    assert lengths.of(rows, len) == 2
