import numpy as np
import pandas
import pyarrow as pa
import pytest

from anyk.lab.config import DataFields
from anyk.lab.data import tables
from anyk.lab.data.prepare import prepare
from anyk.lab.data.tables import TableEncoder
from anyk.lab.errors import LabError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def rows(number, line):
    return "\n".join(line(i) for i in range(number)) + "\n"


def fit(frame, train=None, **settings):
    table = pa.Table.from_pandas(frame)
    return TableEncoder.fit(table, np.arange(len(frame)) if train is None else np.array(train), label="y", **settings), table


def test_means_and_categories_come_from_the_training_rows_alone():
    frame = pandas.DataFrame({"a": [1.0, 3.0, None, 100.0], "c": ["x", "y", "x", "z"], "y": [0, 1, 0, 1]})
    encoder, table = fit(frame, train=[0, 1])
    assert encoder.features == ["a", "c=x", "c=y"]
    assert encoder.transform(table).tolist() == [[1, 1, 0], [3, 0, 1], [2, 1, 0], [100, 0, 0]]


def test_an_unseen_category_acts_as_a_missing_value_and_is_told():
    encoder, _ = fit(pandas.DataFrame({"c": ["x", "y"], "y": [0, 1]}))
    notes = []
    new = pa.Table.from_pandas(pandas.DataFrame({"c": ["z", None, "y"]}))
    assert encoder.transform(new, notes.append).tolist() == [[0, 0], [0, 0], [0, 1]]
    assert any("'c' 1" in note for note in notes)


def test_columns_are_found_by_name_extra_ones_are_named_and_lacking_ones_refused():
    encoder, _ = fit(pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "y": [0, 1]}))
    notes = []
    new = pa.table({"more": [7, 7], "b": [3.0, 4.0], "a": [1.0, 2.0]})
    assert encoder.transform(new, notes.append).tolist() == [[1, 3], [2, 4]]
    assert "more" in notes[0]
    with pytest.raises(LabError, match="no column 'a'"):
        encoder.transform(pa.table({"b": [1.0], "aa": [1.0]}))


def test_it_survives_a_way_through_json():
    encoder, table = fit(pandas.DataFrame({"a": [1.0, None], "c": ["x", "y"], "y": [0, 1]}))
    again = TableEncoder.from_json(encoder.to_json())
    assert again == encoder and (again.transform(table) == encoder.transform(table)).all()
    for wrong in ({}, {"columns": 3}, {"columns": [{"name": "a"}], "label": "", "others": []}):
        with pytest.raises(ValueError, match="columns"):
            TableEncoder.from_json(wrong)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".feather"])
def test_all_kinds_of_files_give_the_same(tmp_path, suffix):
    frame = pandas.DataFrame({"a": np.arange(40) / 3, "c": list("pqrs") * 10, "y": ["no", "yes"] * 20})
    path = tmp_path / f"table{suffix}"
    if suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if suffix == ".csv" else "\t")
    else:
        getattr(frame, f"to_{suffix[1:]}")(path)
    found = prepare(str(path), DataFields(), tmp_path)
    assert found.classes == ("no", "yes") and found.table.features == ["a", "c=p", "c=q", "c=r", "c=s"]
    want = prepare(frame, DataFields(), tmp_path / "frame")
    assert found.examples.parts[0].tolist() == want.examples.parts[0].tolist()


def test_a_file_without_titles(tmp_path):
    path = write(tmp_path / "plain.csv", rows(30, lambda i: f"{i / 7},{i % 4 + 0.5},{i % 3}"))
    found = prepare(str(path), DataFields(), tmp_path)
    assert found.shape == (2,) and found.classes == ("0", "1", "2")


def test_groups_of_a_table_by_chance_labels_come_out_at_chance(tmp_path):
    """Labels belong to groups of ten rows by chance: a split that tears groups apart would show nearly 100 %."""
    rng = np.random.default_rng(0)
    who = np.arange(120).repeat(10)
    frame = pandas.DataFrame(rng.normal(size=(120, 5))[who] + 0.01 * rng.normal(size=(1200, 5)), columns=list("abcde"))
    frame["person"], frame["y"] = [f"p{one}" for one in who], rng.integers(0, 12, 120)[who]
    found = prepare(frame, DataFields(group_column="person"), tmp_path)
    nearest = found.examples.parts[0][found.split.train.numpy()]
    test = found.examples.parts[0][found.split.test.numpy()]
    guess = found.labels[found.split.train][((test[:, None] - nearest) ** 2).sum(2).argmin(1)]
    assert float((guess == found.labels[found.split.test]).float().mean()) < 0.35
    assert "no group is in two parts" in found.how_split and "person" not in " ".join(found.table.features)


def remarks_of(tmp_path, frame, **fields):
    return " ".join(prepare(frame, DataFields(**fields), tmp_path).remarks)


def made(**columns):
    return pandas.DataFrame({"a": np.random.default_rng(0).normal(size=60), **columns, "y": np.arange(60) % 3})


def test_a_column_that_looks_like_groups_is_named_with_both_options(tmp_path):
    told = remarks_of(tmp_path, made(user_id=np.arange(60) // 4 * 7))
    assert "--group-column user_id" in told and "--drop user_id" in told
    assert "user_id" not in remarks_of(tmp_path / "b", made(user_id=np.arange(60) // 4 * 7), drop=("user_id",))


def test_many_repeated_texts_must_be_groups_or_be_left_out(tmp_path):
    frame = pandas.DataFrame({"a": np.arange(900.0) % 17, "name": [f"n{i % 300}" for i in range(900)], "y": np.arange(900) % 3})
    with pytest.raises(LabError, match="--group-column name"):
        prepare(frame, DataFields(), tmp_path)


def test_dates_row_numbers_and_decimal_commas(tmp_path):
    told = remarks_of(
        tmp_path, made(when=[f"2024-03-{1 + i % 28:02}" for i in range(60)], number=np.arange(60), price=[f"{i},5" for i in range(60)])
    )
    assert "--time-column when" in told and "'number' only numbers the rows" in told and "decimal commas" in told
    found = prepare(made(price=[f"{i},5" for i in range(60)]), DataFields(), tmp_path / "c")
    assert found.table.features == ["a", "price"] and float(found.examples.parts[0][3, 1]) == 3.5


def test_the_time_column_makes_the_newest_the_test(tmp_path):
    days = pandas.date_range("2024-01-01", periods=60).to_series().sample(frac=1, random_state=0).reset_index(drop=True)
    found = prepare(made(when=days), DataFields(time_column="when"), tmp_path)
    times = found.times
    assert float(times[found.split.train].max()) < float(times[found.split.test].min())


def test_copies_of_training_rows_in_the_test_are_told(tmp_path):
    frame = pandas.DataFrame({"a": np.arange(100.0) % 20, "b": np.arange(100.0) % 4, "y": np.arange(100) % 2})
    assert "occur in training" in remarks_of(tmp_path, frame)


def test_classes_that_only_the_test_has_are_misses(tmp_path):
    frame = made(when=np.arange(60)).assign(y=["x", "y"] * 29 + ["new", "new"])
    found = prepare(frame, DataFields(time_column="when"), tmp_path)
    assert found.classes == ("x", "y") and found.labels[-1] == -1 and any("new" in one for one in found.remarks)


MISTAKES = {
    "label_column": ({"label_column": "z"}, "--label-column z"),
    "group_column": ({"group_column": "userr"}, "--group-column userr"),
    "drop": ({"drop": ("nothing",)}, "--drop nothing"),
    "fraction": ({"label_column": "a"}, "fraction"),
    "no value twice": ({"label_column": "one"}, "no value twice"),
    "text": ({}, "is text"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tmp_path, name):
    fields, says = MISTAKES[name]
    columns = {"one": np.arange(60) * 3} | ({"said": [f"a sentence, number {i}" for i in range(60)] * 1} if name == "text" else {})
    frame = made(**columns)
    if name == "text":
        frame = pandas.concat([frame] * 5, ignore_index=True)
        frame["said"] = [f"a sentence, number {i}" for i in range(300)]
        frame = frame.drop(columns="one")
    with pytest.raises(LabError, match=says):
        prepare(frame, DataFields(**fields), tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("a,a,y\n1,2,0\n1,2,0\n", "two columns"),
        ("a,y\n1,\n2,0\n3,0\n", "without a label"),
        ("a,y\n1,-1\n2,0\n3,0\n", "negative"),
        ("a,b,y\n1,inf,0\n2,1,0\n3,1,1\n4,2,1\n5,1,0\n6,1,1\n7,2,0\n8,3,1\n9,9,0\n1,1,1\n", "infinite"),
        ("y\n1\n1\n", "one column"),
    ],
)
def test_bad_files_get_a_line(tmp_path, content, says):
    with pytest.raises(LabError, match=says):
        prepare(str(write(tmp_path / "bad.csv", content)), DataFields(), tmp_path / "o")


def test_damaged_files(tmp_path):
    for name, data in (("a.parquet", b"PAR1nonsense"), ("b.feather", b"\x00" * 100), ("c.csv", b'a,y\n"unclosed,1\n')):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LabError):
            prepare(str(tmp_path / name), DataFields(), tmp_path / "o")


def test_a_frame_with_its_own_test_and_other_categories(tmp_path):
    train = pandas.DataFrame({"c": list("ab") * 20, "y": [0, 1] * 20})
    test = pandas.DataFrame({"y": [0, 1, 1], "c": ["a", "z", "b"]})
    found = prepare({"train": train, "test": test}, DataFields(), tmp_path)
    assert found.table.features == ["c=a", "c=b"] and len(found.split.test) == 3
    assert tables.is_frame(train)
