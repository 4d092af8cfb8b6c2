"""Tables: their columns, found by name again; texts, missing numbers, counted rows; the files of pyarrow; frames; logs."""

import dataclasses
import json
import struct

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

from anyk.lab import data as datasets
from anyk.lab.data import arrays, embeddings, in_memory, tables
from anyk.lab.data.table_files import Frame
from anyk.lab.data.tables import Column, Log, Options, Schema
from anyk.lab.errors import LabError

ROWS = 60
WRITERS = {".csv": lambda frame, path: frame.to_csv(path, index=False), ".parquet": pd.DataFrame.to_parquet}
WRITERS[".feather"] = pd.DataFrame.to_feather
LABEL = "The label is 'kind', the last column; --label-column names another."


def frame(rows: int = ROWS) -> pd.DataFrame:
    """Numbers and texts, of which one each is missing, and a label in the last column."""
    random = np.random.default_rng(0)
    made = pd.DataFrame(
        {
            "age": random.normal(40, 10, rows).round(3),
            "colour": random.choice(["red", "blue", "green"], rows),
            "rooms": random.integers(0, 5, rows),
            "kind": random.choice(list("abc"), rows),
        }
    )
    made.loc[3, "age"] = np.nan
    made.loc[5, "colour"] = None
    return made


def encoded(made: pd.DataFrame, categories: tuple[str, ...]) -> torch.Tensor:
    """What the features should be."""
    age = made["age"].fillna(made["age"].mean())
    columns = [age, *((made["colour"] == name).astype(float) for name in categories), made["rooms"]]
    return torch.tensor(np.stack([column.to_numpy(float) for column in columns], 1), dtype=torch.float32)


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_features(tmp_path, suffix):
    made = frame()
    WRITERS[suffix](made, tmp_path / f"a{suffix}")
    found = tables.read(tmp_path / f"a{suffix}", Options())
    assert found.schema.features[0] == "age"
    assert set(found.schema.columns[1].categories) == {"red", "blue", "green"}
    want = encoded(made, found.schema.columns[1].categories)
    torch.testing.assert_close(found.examples, want)
    assert found.labels.tolist() == made["kind"].tolist()
    assert found.remarks == [
        LABEL,
        "Columns of texts that are one-hot encoded, with the number of their categories: 'colour' 3.",
        "Missing values that are filled, a number with the mean of its column, a text with no category: 'age' 1, 'colour' 1.",
    ]
    # The same columns in another order, with a title more that pandas gives to its index, in blocks of any size.
    shuffled = made[["rooms", "kind", "colour", "age"]]
    shuffled.to_csv(tmp_path / "other.csv")
    said: list[str] = []
    blocks = list(tables.blocks(tmp_path / "other.csv", found.schema, 7, note=said.append))
    assert [len(block) for block in blocks] == [7] * 8 + [4]
    torch.testing.assert_close(torch.cat(blocks), want)
    assert said[0].endswith("other.csv has a column '' more, as pandas calls an index; it is left out.")
    frames = tables.blocks(Frame.of(shuffled, "data"), found.schema, 100)
    torch.testing.assert_close(torch.cat(list(frames)), want)


def test_a_schema_goes_through_json_and_a_set(tmp_path):
    frame().to_parquet(tmp_path / "a.parquet")
    schema = arrays.read(tmp_path / "a.parquet").table
    assert Schema.from_json(json.loads(json.dumps(dataclasses.asdict(schema)))) == schema
    notes: list[str] = []
    arrays.import_file(tmp_path / "a.parquet", out=tmp_path / "set", note=notes.append)
    assert embeddings.read(tmp_path / "set").table == schema
    assert len(notes) == 3
    about = json.loads((tmp_path / "set" / "dataset.json").read_text())
    for lie, message in (
        ({"columns": []}, "not described as files of this version"),
        ({**about["table"], "columns": [{"name": 1, "mean": 0, "categories": None}]}, "a text as its name"),
        ({**about["table"], "columns": about["table"]["columns"][:1]}, "a table of 1 features, but train has"),
        ({**about["table"], "columns": about["table"]["columns"][:1] * 2}, "two columns of its table have one name"),
    ):
        (tmp_path / "set" / "dataset.json").write_text(json.dumps({**about, "table": lie}))
        with pytest.raises(LabError, match=rf"dataset.json .*{message}.*: make the set again"):
            embeddings.read(tmp_path / "set")


def test_columns_that_are_missing_or_unknown_are_named(tmp_path):
    schema = tables.read(Frame.of(frame(), "data"), Options()).schema
    for changed, message in (
        (frame().drop(columns=["age", "rooms"]), r"new.csv has no column 'age', 'rooms': the columns are age, colour, rooms\."),
        (frame().assign(x=1, y=2), r"new.csv has 'x', 'y', which the training table had not: --drop leaves columns out\."),
        (
            frame().rename(columns={"age": "Age"}),
            r"has no column 'age', and has 'Age', which the training table had not: the col",
        ),
        (frame().assign(age="old"), r"new.csv should have numbers in column 'age', but has 'old' in line 2\."),
    ):
        changed.to_csv(tmp_path / "new.csv", index=False)
        with pytest.raises(LabError, match=message):
            list(tables.blocks(tmp_path / "new.csv", schema, 100))
    frame().assign(x=1).to_csv(tmp_path / "new.csv", index=False)
    assert len(next(tables.blocks(tmp_path / "new.csv", schema, 100, Options(drop=("x",))))) == ROWS
    frame().to_csv(tmp_path / "new.csv", index=False, header=False)
    with pytest.raises(
        LabError, match=r"has no line of titles, but the model knows its columns by name \(age, colour, rooms\)"
    ):
        list(tables.blocks(tmp_path / "new.csv", schema, 100))


def test_a_test_table_has_the_columns_of_the_training_table(tmp_path):
    made = frame()
    made.to_csv(tmp_path / "train.csv", index=False)
    test = made[::-1][["kind", "rooms", "colour", "age"]]
    test.to_parquet(tmp_path / "test.parquet", index=False)
    arrays.import_file(tmp_path / "train.csv", out=tmp_path / "set", test=tmp_path / "test.parquet")
    dataset = embeddings.read(tmp_path / "set")
    torch.testing.assert_close(dataset.test.parts[0], dataset.train.parts[0].flip(0))
    assert dataset.test.labels.tolist() == dataset.train.labels.flip(0).tolist()
    test.drop(columns="age").to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(LabError, match=r"less.csv has no column 'age'"):
        arrays.import_file(tmp_path / "train.csv", out=tmp_path / "set2", test=tmp_path / "less.csv")
    assert not (tmp_path / "set2").exists()


@pytest.mark.parametrize("start", [0, 1, 10_001])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_column_that_counts_the_rows_is_left_out_and_told(tmp_path, start, shuffled):
    numbers = np.arange(start, start + ROWS)
    made = frame().drop(columns="colour").fillna(40)
    made.insert(1, "id", np.random.default_rng(0).permutation(numbers) if shuffled else numbers)
    made.to_csv(tmp_path / "a.csv", index=False)
    found = tables.read(tmp_path / "a.csv", Options())
    assert found.schema.features == ["age", "rooms"]
    assert found.schema.others == ("id",)
    assert found.remarks == [LABEL, "Only the rows are counted in 'id', so it is left out; --row-numbers takes it."]
    torch.testing.assert_close(torch.cat(list(tables.blocks(tmp_path / "a.csv", found.schema, 9))), found.examples)
    kept = tables.read(tmp_path / "a.csv", Options(row_numbers=True))
    assert (kept.schema.features, kept.remarks) == (["age", "id", "rooms"], [LABEL])
    made["id"] *= 2  # numbers that may count something else, or not
    made.to_csv(tmp_path / "a.csv", index=False)
    told = "'id' has another whole number in every row. If that only names the row, leave it out: --drop 'id'."
    assert tables.read(tmp_path / "a.csv", Options()).remarks == [LABEL, told]
    made["id"] //= 4  # twice each
    made.to_csv(tmp_path / "a.csv", index=False)
    assert tables.read(tmp_path / "a.csv", Options(label_column="kind")).remarks == []


def test_the_index_of_pandas_is_left_out_whatever_it_holds(tmp_path):
    made = frame().drop(columns="colour").fillna(40).sample(30, random_state=0)
    made.to_csv(tmp_path / "a.csv")
    assert tables.read(tmp_path / "a.csv", Options()).schema.features == ["age", "rooms"]
    made.index.name = "house"
    made.to_parquet(tmp_path / "a.parquet")
    found = tables.read(tmp_path / "a.parquet", Options())
    assert (found.schema.features, found.schema.label) == (["age", "rooms"], "kind")
    assert found.remarks == [LABEL, f"The index of {tmp_path / 'a.parquet'} is left out: 'house'; --row-numbers takes it."]
    assert tables.read(tmp_path / "a.parquet", Options(row_numbers=True)).schema.features == ["age", "rooms", "house"]


def test_options_about_columns(tmp_path):
    frame().to_csv(tmp_path / "a.csv", index=False)
    read = lambda **options: tables.read(tmp_path / "a.csv", Options(**options))  # noqa: E731
    assert read(drop=("colour", "age")).schema.features == ["rooms"]
    assert read(drop=("colour", "age")).schema.others == ("age", "colour")
    assert {*read(categories=("rooms",)).schema.features[4:]} == {f"rooms={number}" for number in range(5)}
    for options, message in (
        ({"missing": "refuse"}, r"a.csv has no value in column 'age', line 5: .*, or give --missing mean"),
        ({"drop": ("colr",)}, r"a.csv has no column 'colr': its columns are, the likeliest first, colour"),
        ({"categories": ("kind",)}, r"--categories names 'kind', but that is the column with the labels"),
        ({"label_column": "colour"}, r"a.csv has 1 example with an empty label \(the first: line 7\)"),
    ):
        with pytest.raises(LabError, match=message):
            read(**options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,c,y\n1,2,a\n2,2O,a\n", r"numbers and texts in column 'c', such as '2O' in line 3: mend it, .*--categories 'c'"),
        ("x,c,y\n1,two,a\n2,3,a\n", r"numbers and texts in column 'c', such as"),
        ("x,c,y\n1,,a\n2,,a\n", r"no value at all in column 'c': leave it out, --drop 'c'"),
        ("x,c,y\n1,-inf,a\n2,3,a\n", r"the number -inf in column 'c', line 2"),
        ("x,x,y\n1,2,a\n2,3,a\n", r"has two columns called 'x'"),
        (
            "red,1.5,a\nblue,2.5,b\nred,2,a\n",
            r"first line of .* may be titles or an example \('red' is no number, and nor is 'blue'",
        ),
        ("red,a\nblue,b\nred,b\n", r"first line of .* was taken for titles, but 'red' and the others stand below too"),
        (
            "x,n,y\n" + "".join(f"1,name {n},a\n" for n in range(300)),
            r"more than 256 different texts in .* of column 'n' \('name 0'",
        ),
    ],
)
def test_columns_that_are_refused(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(LabError, match=message):
        tables.read(tmp_path / "a.csv", Options())


def test_a_table_without_titles_is_matched_by_place(tmp_path):
    frame().drop(columns="colour").to_csv(tmp_path / "a.csv", index=False, header=False)
    found = tables.read(tmp_path / "a.csv", Options())
    assert (found.schema.features, found.schema.titled, found.schema.label) == (["1", "2"], False, "3")
    torch.testing.assert_close(torch.cat(list(tables.blocks(tmp_path / "a.csv", found.schema, 9))), found.examples)
    frame()[["age", "rooms"]].to_csv(tmp_path / "b.csv", index=False, header=False)
    torch.testing.assert_close(torch.cat(list(tables.blocks(tmp_path / "b.csv", found.schema, 9))), found.examples)
    frame()[["age"]].to_csv(tmp_path / "b.csv", index=False, header=False)
    with pytest.raises(LabError, match=r"b.csv has no column '2'"):
        list(tables.blocks(tmp_path / "b.csv", found.schema, 9))


def test_texts_that_training_had_not_are_none_and_told(tmp_path):
    schema = tables.read(Frame.of(frame(), "data"), Options()).schema
    said: list[str] = []
    new = frame().fillna({"age": 40, "colour": "red"}).assign(colour=["pink", "grey", *["red"] * (ROWS - 2)])
    rows = torch.cat(list(tables.blocks(Frame.of(new, "new"), schema, 100, note=said.append)))
    assert rows[:2, 1:4].sum() == 0
    assert rows[2:, 1:4].sum() == ROWS - 2
    assert said == [
        "new: 2 rows have texts in column 'colour' that the training table had not, such as 'pink': none of its categories."
    ]


def test_types_of_pyarrow(tmp_path):
    kinds = ["a", "b"] * 3
    table = pa.table(
        {
            "small": pa.array([1, None, 3, 4, 5, 7], pa.uint8()),
            "exact": pa.array(["1.5", "2.5", "3.5", None, "1", "0"]).cast(pa.decimal128(4, 2)),
            "word": pa.array(["x", "y", None, "x", "y", "x"]).dictionary_encode(),
            "flag": pa.array([True, False, None, True, True, False]),
            "kind": kinds,
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "a.feather", compression="lz4")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.feather", "a.arrow"):
        found = tables.read(tmp_path / name, Options())
        assert found.schema.features == ["small", "exact", "word=x", "word=y", "flag=True", "flag=False"]
        assert found.examples.tolist()[2] == [3, 3.5, 0, 0, 0, 0]
        assert found.examples.tolist()[1] == [4, 2.5, 0, 1, 0, 1]
        assert found.labels.tolist() == kinds
    for column, kind in ((pa.array([[1.0]] * 6), "list<"), (pa.array([0] * 6, pa.timestamp("s")), r"timestamp\[ms\]")):
        pyarrow.parquet.write_table(table.add_column(0, "odd", column), tmp_path / "b.parquet")
        with pytest.raises(
            LabError, match=rf"b.parquet has in column 'odd' {kind}.*, which is neither numbers nor texts: .*--drop"
        ):
            tables.read(tmp_path / "b.parquet", Options())
        assert len(tables.read(tmp_path / "b.parquet", Options(drop=("odd",))).labels) == 6


def test_files_that_are_damaged_or_unpack_to_too_much(tmp_path):
    frame().to_parquet(tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for name, damaged in (("b.parquet", content[:-20]), ("b.feather", content), ("c.parquet", b"PAR1" * 5)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(LabError, match=rf"{name} is damaged or not a table \(.*\): copy it or make it again"):
            tables.read(tmp_path / name, Options())
    rows = 3_000_000  # one value: a few hundred bytes
    for name, write in (("z.parquet", pyarrow.parquet.write_table), ("z.feather", pyarrow.feather.write_feather)):
        zeros = pa.array(np.zeros(rows, np.float32))
        write(pa.table({f"x{n}": zeros for n in range(8)}), str(tmp_path / name), compression="zstd")
        with pytest.raises(LabError, match=rf"{name} would unpack to .* times its size"):
            tables.read(tmp_path / name, Options())


def test_a_size_that_a_buffer_claims_is_looked_at_before_it_is_allocated(tmp_path):
    pyarrow.feather.write_feather(pa.table({"x": np.zeros(10_000, np.float32)}), str(tmp_path / "a.feather"), compression="lz4")
    content, size = (tmp_path / "a.feather").read_bytes(), struct.pack("<q", 40_000)
    assert content.count(size) == 1
    (tmp_path / "a.feather").write_bytes(content.replace(size, struct.pack("<q", 1 << 50)))
    with pytest.raises(LabError, match=r"a.feather would unpack to 1,125,899,907 MB"):
        tables.read(tmp_path / "a.feather", Options())


def test_frames_are_kept_as_sets_that_know_their_columns(tmp_path):
    made = frame()
    word = in_memory.keep(made.sample(frac=1, random_state=0), tmp_path, Options(label_column="kind"))
    assert datasets.load(word).table.label == "kind"
    both = in_memory.keep((made, made[["kind", "rooms", "colour", "age"]]), tmp_path, Options(label_column="kind"))
    dataset = datasets.load(both)
    torch.testing.assert_close(dataset.train.parts[0], dataset.test.parts[0])
    assert in_memory.keep({"train": pa.table(made), "test": made, "name": "houses"}, tmp_path).startswith(f"{tmp_path}/houses-")
    for data, options, message in (
        (made, Options(label_column="sort"), r"data has no column 'sort'"),
        ({"train": made, "groups": [1] * ROWS}, Options(), r"data has groups beside a table: give its rows a column 'groups'"),
        ((np.zeros((4, 2)), [0, 1, 0, 1]), Options(label_column="y"), r"label_column and the like are for a table"),
        (made.assign(age=[object()] * ROWS), Options(), r"data is no table of numbers and texts"),
    ):
        with pytest.raises(LabError, match=message):
            in_memory.keep(data, tmp_path, options)


LOG = pd.DataFrame(
    {
        "who": [2, 1, 2, 1, 2, 1, 2],
        "what": ["tea", "a b", "milk", "tea", "milk", "milk", "tea"],
        "when": ["2024-01-03", "2024-01-02 10:00", "2024-01-01", "2024-01-01", "2024-02-01", "2023-01-01", "2024-01-03"],
    }
)


def test_a_log_becomes_the_sequences_of_its_users(tmp_path):
    LOG.to_csv(tmp_path / "log.csv", index=False)
    LOG.assign(when=pd.to_datetime(LOG["when"], format="ISO8601")).to_parquet(tmp_path / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        users, found = tables.sequences(tmp_path / name, Log("who", "what", "when"))
        assert users == ["2", "1"]
        assert found == [["milk", "tea", "tea", "milk"], ["milk", "tea", "a b"]]
        dataset = datasets.load(f"sequences:{tmp_path / name}", log=Log("who", "what", "when"))
        assert (len(dataset.test), dataset.tokens, dataset.remarks[0][:12]) == (2, "items", "Test targets")
    dataset = datasets.load(f"sequences:{tmp_path / 'log.csv'}", log=Log("who", "what"))
    assert dataset.remarks[0] == "The items of each user are in the order of the rows: --order was not given."
    for log, message in (
        (None, r"log.csv is a table \(who, what, when\): name the columns .*--user COLUMN --item COLUMN --order COLUMN"),
        (Log("user", "what"), r"log.csv has no column 'user'"),
        (Log("when", "what"), r"no user of .*log.csv has three items, .*: is 'when' the column of the users\? \(5 of them"),
        (Log("who", "what", "what"), r"log.csv should have numbers or times .* in column 'what', but has 'tea' in line 2"),
    ):
        with pytest.raises(LabError, match=message):
            datasets.load(f"sequences:{tmp_path / 'log.csv'}", log=log)
    LOG.assign(what=[*LOG["what"][:-1], None]).to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(LabError, match=r"log.csv has an empty cell in column 'what', line 8: fill it or remove the row"):
        datasets.load(f"sequences:{tmp_path / 'log.csv'}", log=Log("who", "what", "when"))


def test_options_for_other_data_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    with pytest.raises(LabError, match=r"drop is for a table, .* but data is .*a.npz: leave it out"):
        datasets.load(str(tmp_path / "a.npz"), options=Options(drop=("x",)))
    with pytest.raises(LabError, match=r"user, item and order are for a log, .*: leave them out"):
        datasets.load("glyphs", log=Log("a", "b"))


def test_column_widths():
    schema = Schema((Column("a"), Column("b", categories=("x", "y"))))
    assert (schema.width, schema.features) == (3, ["a", "b=x", "b=y"])
