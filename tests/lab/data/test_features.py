"""Mean and deviation of features: of the training part alone, in one pass, remembered."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anyk.lab.data import Split, embeddings, features, load

ROWS = 300


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.Tensor:
    """Features of very different scales; two do not vary."""
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embeddings, "_BLOCK_BYTES", 7 * 5 * 4)  # seven rows at a time
    made = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0))
    made = made * torch.tensor([1.0, 1e-3, 1e3, 0.0, 0.0]) + torch.tensor([0.0, 5.0, -1e4, 0.0, 0.1])
    return made


def expected(values: torch.Tensor, index: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    rows = values[index].double().numpy()
    return rows.mean(0), np.where(rows.std(0) > 1e-9, rows.std(0), 1.0)


def close(found: features.Statistics, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4)


def test_of_the_positions_that_count_and_no_others(values: torch.Tensor) -> None:
    before = values.clone()
    index = torch.arange(ROWS)[torch.arange(ROWS) % 3 > 0]
    for parts in ((values,), values.split([10, 90, 200])):
        close(features.statistics(Split(tuple(parts), torch.zeros(ROWS).long()), index, "key"), expected(values, index))
    assert torch.equal(values, before)
    (mean, std), (_, one) = (
        features.statistics(Split((values,), torch.zeros(ROWS).long()), torch.tensor(chosen), "key") for chosen in ([5, 6], [9])
    )
    assert mean == pytest.approx(values[5:7].mean(0).tolist(), rel=1e-5)
    assert one == (1.0,) * 5
    assert std[3:] == (1.0, 1.0)


def test_of_mapped_files_they_are_remembered(values: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    labels = torch.arange(ROWS) % 4
    for number, (part, own) in enumerate(zip(values.split(110), labels.split(110), strict=True)):
        save_file({"embeddings": part.clone(), "labels": own.clone()}, folder / f"train-{number}.safetensors")
    (folder / "dataset.json").write_text(json.dumps({"classes": list("abcd")}))
    train = load(str(folder)).train
    assert len(train.maps) == 3
    index = torch.arange(20, 290)
    first = features.statistics(train, index, ["print", 1])
    close(first, expected(values, index))

    monkeypatch.setattr(embeddings, "blocks", lambda part: pytest.fail("it was read again"))
    assert features.statistics(train, index, ["print", 1]) == first
    monkeypatch.undo()
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    close(features.statistics(train, index[:100], ["print", 2]), expected(values, index[:100]))
    for file in (tmp_path / "cache" / "features").iterdir():
        file.write_text("{}")
    close(features.statistics(train, index, ["print", 1]), expected(values, index))
