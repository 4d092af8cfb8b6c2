"""Splits of a data set, and what is measured of its images."""

import dataclasses

import pytest
import torch

import lab_data
from anyk.lab.data import Dataset, Split, cache, split
from anyk.lab.data.sets import with_statistics
from anyk.lab.errors import LabError


def given(validation: list[int] | None, *, test: bool) -> Dataset:
    """Ten examples of each of four classes; all values of an example are its position."""
    rows = torch.arange(40.0)[:, None].repeat(1, 3)
    train = Split((rows,), torch.arange(4).repeat(10))
    places = None if validation is None else torch.tensor(validation, dtype=torch.int64)
    return Dataset("four", "embeddings", tuple("abcd"), train, train if test else None, "", validation=places)


@pytest.mark.parametrize("test", [True, False])
def test_a_validation_of_the_source_stays_as_it_is(test: bool) -> None:
    dataset = given([33, 5, 6, 7, 12], test=test)
    parts = split(dataset, validation=0.5, test=0.2, seed=3)
    assert parts.validation.tolist() == [5, 6, 7, 12, 33]
    rest = set(range(40)) - {5, 6, 7, 12, 33}
    if test:
        assert parts.test is dataset.test
        assert parts.test_index.tolist() == list(range(40))
        assert parts.train.tolist() == sorted(rest)
    else:
        assert parts.test is dataset.train
        assert set(parts.train.tolist()) | set(parts.test_index.tolist()) == rest
        assert len(parts.train) + len(parts.test_index) == len(rest)
        assert len(parts.test_index) == 7


@pytest.mark.parametrize(("validation", "fraction"), [([], 0.1), (None, 0.0)])
def test_a_validation_that_is_empty_is_told(validation: list[int] | None, fraction: float) -> None:
    with pytest.raises(LabError, match="no example of four is left for validation"):
        split(given(validation, test=True), validation=fraction, test=0.2, seed=0)


def test_the_cache_keeps_the_validation_and_joins_parts(tmp_path) -> None:
    images = lab_data.image_set(size=4)
    plain = cache.fingerprint(images)
    divided = dataclasses.replace(images, train=Split(images.train.parts[0].split((60, 12)), images.train.labels))
    assert cache.fingerprint(divided) == plain
    dataset = dataclasses.replace(divided, validation=torch.arange(60, 72))
    other = dataclasses.replace(divided, validation=torch.arange(59, 71))
    assert len({plain, cache.fingerprint(dataset), cache.fingerprint(other)}) == 3
    built = cache.remember(tmp_path / "set", lambda: dataset)
    read = cache.remember(tmp_path / "set", lambda: pytest.fail("it was built again"))
    assert read.validation is not None
    assert read.validation.tolist() == list(range(60, 72))
    assert torch.equal(read.train.parts[0], images.train.parts[0])
    assert read.fingerprint == built.fingerprint == cache.fingerprint(dataset)


@pytest.mark.parametrize("parts", [(12,), (9, 3), (5, 7)])
def test_the_statistics_are_of_the_training_images_alone(parts: tuple[int, ...]) -> None:
    pixels = torch.randint(256, (12, 2, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels[9:] = 255
    train = Split(tuple(pixels.split(parts)), torch.zeros(12, dtype=torch.int64))
    dataset = with_statistics(Dataset("made", "images", ("a",), train, None, "", validation=torch.arange(9, 12)))
    expected = pixels[:9].double() / 255
    torch.testing.assert_close(torch.tensor(dataset.mean).double(), expected.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(dataset.std).double(), expected.std((0, 2, 3), unbiased=False))


def grouped(groups: torch.Tensor, labels: torch.Tensor) -> Dataset:
    examples = Split((torch.zeros(len(labels), 2),), labels, groups=groups)
    return Dataset("grouped", "embeddings", tuple(map(str, range(int(labels.max()) + 1))), examples, None, "")


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_in_two_parts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(300).repeat_interleave(torch.randint(1, 20, (300,), generator=generator))
    labels = torch.randint(6, (300,), generator=generator)[groups]
    parts = split(grouped(groups, labels), validation=0.1, test=0.2, seed=seed)
    found = [set(groups[index].tolist()) for index in (parts.train, parts.validation, parts.test_index)]
    assert not found[0] & found[1]
    assert not found[0] & found[2]
    assert not found[1] & found[2]
    assert sorted(torch.cat((parts.train, parts.validation, parts.test_index)).tolist()) == list(range(len(labels)))
    shares = torch.bincount(labels[parts.test_index], minlength=6) / torch.bincount(labels)
    assert 0.1 < float(shares.min()) <= float(shares.max()) < 0.3


def test_labels_that_belong_to_groups_by_chance_cannot_be_known() -> None:
    """The nearest training example is right nearly always where rows of one group are in both parts."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(300).repeat_interleave(10)
    rows = torch.randn(300, 5, generator=generator)[groups] + 0.01 * torch.randn(3000, 5, generator=generator)
    labels = torch.randint(15, (300,), generator=generator)[groups]
    parts = split(grouped(groups, labels), validation=0.1, test=0.2, seed=0)
    nearest = torch.cdist(rows[parts.test_index], rows[parts.train]).argmin(1)
    assert float((labels[parts.train][nearest] == labels[parts.test_index]).float().mean()) < 0.2


def test_too_few_groups_are_told() -> None:
    groups = torch.arange(2).repeat_interleave(10)
    with pytest.raises(LabError, match="there are 2"):
        split(grouped(groups, torch.arange(20) % 2), validation=0.1, test=0.2, seed=0)
