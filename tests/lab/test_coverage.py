"""How many guesses cover a share of the test examples: counted one by one, exact where shares are whole numbers."""

import numpy as np
import pytest

from anyk.lab.coverage import SHARES, Coverage


@pytest.mark.parametrize("size", [1, 7, 20, 100, 1003])
def test_it_is_the_smallest_k_that_covers_as_much(size):
    ranks = np.random.default_rng(size).geometric(0.05, (3, size)).clip(max=41)  # 41: of no class
    found = Coverage.of("softmax", ranks, classes=40)
    assert found.method == "softmax"
    for share in SHARES:
        enough = [k for k in range(1, 41) if 100 * (ranks <= k).sum() >= share * ranks.size]
        assert found.guesses[share] == (enough[0] if enough else None)
    for k, covered in found.curve:
        assert covered == (ranks <= k).mean()
    assert [k for k, _ in found.curve] == list(range(1, 41))


def test_of_many_classes_a_curve_has_few_points():
    found = Coverage.of("softmax", np.arange(1, 100_001), classes=100_000)
    assert found.guesses == {50: 50_000, 80: 80_000, 90: 90_000, 95: 95_000, 99: 99_000}
    assert len(found.curve) <= 60
    assert found.curve[0] == (1, 1e-5)
    assert found.curve[-1] == (100_000, 1.0)
    assert Coverage.of("one class", np.ones(3), classes=1).curve == ((1, 1.0),)
