import numpy as np
import pandas
import pytest
import torch

from anyk.lab.config import DataFields
from anyk.lab.data import sequences
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import LabError


def text(tmp_path, *lines):
    path = tmp_path / "s.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"sequences:{path}"


def test_the_last_item_is_the_test_and_the_one_before_it_validation(tmp_path):
    found = prepare(text(tmp_path, "a b a b c d", "b a b a", "a b"), DataFields(), tmp_path)
    known = found.classes
    words = [known[label] if label >= 0 else None for label in found.labels.tolist()]
    # of each sequence all but the first item are targets; d and c are in no training part
    assert known == ("a", "b") and words == ["b", "a", "b", None, None, "a", "b", "a", "b"]
    assert found.split.test.tolist() == [4, 7] and found.split.validation.tolist() == [3, 6]
    context = found.examples.take(torch.tensor([1, 5]))
    assert context.tolist() == [[3, 3, 3, 3, 0, 1], [3, 3, 3, 3, 3, 1]]  # padding is 3, another token 2


def test_what_was_seen(tmp_path):
    found = prepare(text(tmp_path, "a b c a b", "c b a c"), DataFields(mask_seen=True), tmp_path)
    rows, classes = found.examples.seen(torch.tensor([2, 5]))
    seen = {(r, found.classes[c]) for r, c in zip(rows.tolist(), classes.tolist(), strict=True)}
    assert found.mask_seen and seen == {(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c")}


def test_a_log_is_ordered_by_time(tmp_path):
    rng = np.random.default_rng(0)
    log = pandas.DataFrame({"who": np.arange(10).repeat(6), "when": np.tile(np.arange(6), 10), "what": [f"i{i % 4}" for i in range(60)]})
    log.sample(frac=1, random_state=1).to_csv(tmp_path / "log.csv", index=False)
    fields = {"group_column": "who", "label_column": "what", "time_column": "when"}
    found = prepare(f"sequences:{tmp_path / 'log.csv'}", DataFields(**fields), tmp_path)
    assert found.kind == "sequences" and len(found.split.test) == 10
    begins = [log[log.who == one].what.tolist() for one in (0,)][0]
    first = found.examples.take(torch.tensor([3]))[0, -4:]
    assert sorted(begins)[0] in found.classes and len(first) == 4 and rng is not None
    with pytest.raises(LabError, match="--group-column"):
        prepare(f"sequences:{tmp_path / 'log.csv'}", DataFields(), tmp_path / "o")


@pytest.mark.parametrize(
    ("lines", "says"), [((), "empty"), (("a b", "b a"), "three items"), (("\0 a b c",), "NUL")]
)
def test_bad_files(tmp_path, lines, says):
    with pytest.raises(LabError, match=says):
        prepare(text(tmp_path, *lines), DataFields(), tmp_path)


def test_completion_of_a_small_library(tmp_path):
    for number in range(40):
        (tmp_path / f"module{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (:\n", encoding="utf-8")
    found = sequences.completion(12, tmp_path)
    assert len(found.classes) == 12 and "return" in found.classes and "<newline>" in found.classes
    parts = set(found.test.tolist()) | set(found.validation.tolist())
    assert parts and len(parts) < len(found.labels)


def test_tokens_of_python():
    assert list(sequences.python_tokens(b"x = f'{y}'\n")) == ["x", "=", "<string>", "<newline>"]
    assert list(sequences.python_tokens(b"def (")) == []
