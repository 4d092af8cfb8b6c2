"""Sequences from text files, MovieLens' files and plain text: what is read, how it is divided, and all that can be wrong."""

import hashlib
import random
import re
import time

import pytest
import torch

from anyk.lab import data
from anyk.lab.data import movielens, sequences
from anyk.lab.errors import LabError


def names(dataset, split):
    """The targets of a split by name; `?` for one that is no class."""
    return [dataset.classes[label] if label >= 0 else "?" for label in split.labels.tolist()]


def read_back(dataset):
    """The sequences of a set by name; `?` for a token that is no class."""
    shown = [*dataset.classes, "?"]
    split = dataset.train
    bounds = zip(split.begins.tolist()[:-1], split.begins.tolist()[1:], strict=True)
    return [[shown[token] for token in split.stream[begin:end].tolist()] for begin, end in bounds]


def parts_of(dataset):
    """For each sequence with a target, the part that it is in."""
    split = dataset.train
    found = {}
    of_train = dataset.validation.tolist()
    for examples, part_of in ((split, lambda n: 1 if n in of_train else 0), (dataset.test, lambda n: 2)):
        for n, place in enumerate(examples.places.tolist()):
            row = int((split.begins <= place).sum()) - 1
            assert found.setdefault(row, part_of(n)) == part_of(n)
    return found


# --- sequences:FILE ---------------------------------------------------------------------------------------------------


def test_the_last_of_each_line_is_the_test(tmp_path):
    file = tmp_path / "basket.txt"
    file.write_text("milk bread\tmilk  eggs\n\n  bread milk tea\nmilk tea\nbread\n12 9999999999999999999999 milk bread")
    dataset = data.load(f"sequences:{file}")
    assert (dataset.name, dataset.kind, dataset.tokens) == ("basket", "sequences", "items")
    # Of the training part: milk bread | bread | milk tea | bread | 12 99…
    assert dataset.classes == ("bread", "milk", "12", "9999999999999999999999", "tea")
    assert read_back(dataset) == [
        ["milk", "bread", "milk", "?"],
        ["bread", "milk", "tea"],
        ["milk", "tea"],
        ["bread"],
        ["12", "9999999999999999999999", "milk", "bread"],
    ]
    assert names(dataset, dataset.test) == ["?", "tea", "bread"]
    held = dataset.validation.tolist()
    assert [name for n, name in enumerate(names(dataset, dataset.train)) if n in held] == ["milk", "milk", "milk"]
    trained = [name for n, name in enumerate(names(dataset, dataset.train)) if n not in held]
    assert trained == ["bread", "tea", "9999999999999999999999"]
    assert [remark.split(": ")[1] for remark in dataset.remarks] == ["1.", "2.", "1 of 3."]
    assert data.load(f"sequences:{file}", split="last").fingerprint == dataset.fingerprint


@pytest.mark.parametrize("shares", [(0.1, 0.2), (0.3, 0.05)])
def test_whole_lines_by_share(tmp_path, shares):
    pick = random.Random(0)
    lines = [[str(pick.randrange(40)) for _ in range(pick.randint(2, 9))] for _ in range(60)]
    file = tmp_path / "a.txt"
    file.write_text("\n".join(map(" ".join, lines)) + "\n")
    dataset = data.load(f"sequences:{file}", split="lines", shares=shares)
    parts = parts_of(dataset)
    assert [sum(part == which for part in parts.values()) for which in (1, 2)] == [round(share * 60) for share in shares]
    trained = {item for row, line in enumerate(lines) if parts[row] == 0 for item in line}
    assert set(dataset.classes) == trained
    assert read_back(dataset) == [[item if item in trained else "?" for item in line] for line in lines]
    # Every item but the first of a line is a target, of the test one that was never seen as well.
    expected = [item if item in trained else "?" for row, line in enumerate(lines) if parts[row] == 2 for item in line[1:]]
    assert names(dataset, dataset.test) == expected
    assert not any("empty" in remark for remark in dataset.remarks)  # the last line end begins no line
    assert dataset.test.groups.tolist() == [row for row, line in enumerate(lines) if parts[row] == 2 for _ in line[1:]]


def test_lines_keep_their_part_on_every_machine():
    by_hash = sorted(range(20), key=lambda n: hashlib.sha256(f"anyk\0{n}".encode()).hexdigest())
    assert by_hash[:6] == [7, 14, 17, 15, 11, 18]
    found = sequences.parts_by_hash([str(n) for n in range(20)], (0.1, 0.2))
    assert found == [2 if n in by_hash[:4] else 1 if n in by_hash[4:6] else 0 for n in range(20)]
    assert sequences.parts_by_hash(["a", "b", "c"], (0.01, 0.01)).count(0) == 1  # each part has one, where there are three


def test_a_mark_and_line_ends_of_other_systems_change_nothing(tmp_path):
    plain = "a b c\nb é a é\n\nc a b\n"
    found = []
    for number, raw in enumerate((plain.encode(), b"\xef\xbb\xbf" + plain.encode(), plain.replace("\n", "\r\n").encode())):
        file = tmp_path / str(number) / "same.txt"
        file.parent.mkdir()
        file.write_bytes(raw)
        dataset = data.load(f"sequences:{file}")
        found.append((dataset.fingerprint, dataset.remarks))
    assert len(set(found)) == 1
    # Signs that end a line for some, but not here.
    (tmp_path / "b.txt").write_text("a b\u2028c d\x0ce f\na b c d")
    assert len(data.load(f"sequences:{tmp_path / 'b.txt'}").train.begins) == 3


def test_a_prepared_file_is_used_until_it_or_the_setting_changes(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("a b a b\n" * 12)
    read = []
    reader = sequences.read_lines
    monkeypatch.setattr(sequences, "read_lines", lambda path: read.append(path) or reader(path))

    def load(**how):
        data.load(f"sequences:{file}", **how)
        return len(read)

    assert [load(), load(), load(shares=(0.3, 0.3))] == [1, 1, 1]
    assert [load(split="lines"), load(split="lines"), load(split="lines", shares=(0.3, 0.3))] == [2, 2, 3]
    file.write_text("a b a b c\n" * 12)
    assert load() == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{file} is empty: it should have one sequence on each line."),
        (b"a b c\na \0 c\n", "{file} has a NUL byte in line 2, so it is no text in UTF-8: save it as UTF-8."),
        (b"a b c\na b \xe9t\xe9\n", "{file} is not in UTF-8 (the byte 0xE9 in line 2): save it as UTF-8."),
        ("a b c\n".encode("utf-16"), "{file} is not in UTF-8 (the byte 0xFF in line 1): save it as UTF-8."),
        ("a b c\n".encode("utf-16-le"), "{file} has a NUL byte in line 1, so it is no text in UTF-8: save it as UTF-8."),
        (b"7 7 7\n7 7\n", "{file} has one kind of item only, '7': there is nothing to guess."),
    ],
)
def test_files_that_are_no_sequences(tmp_path, content, message):
    file = tmp_path / "wrong.txt"
    file.write_bytes(content)
    with pytest.raises(LabError) as error:
        data.load(f"sequences:{file}")
    assert str(error.value) == message.format(file=file)


def test_paths_and_settings_that_cannot_be(tmp_path):
    (tmp_path / "a.txt").write_text("a b a b\n" * 9)
    for spec, message in (
        (f"sequences:{tmp_path}", "is a folder: sequences:FILE wants a text file, one sequence on each line"),
        (f"sequences:{tmp_path / 'no.txt'}", "does not exist: sequences:FILE wants a text file"),
        ("sequences:", "sequences: wants a path, sequences:FILE."),
        ("movielens", "movielens does not exist; DATA may be glyphs, .*completion.*sequences:FILE, movielens:PATH, words:PATH"),
    ):
        with pytest.raises(LabError, match=message):
            data.load(spec)
    with pytest.raises(LabError, match=r"^image_size resizes images, but a holds sequences: leave it out"):
        data.load(f"sequences:{tmp_path / 'a.txt'}", image_size=8)
    for spec, shares in (("sequences:{}", (0.0, 0.2)), ("words:{}", (0.1, 0.0)), ("movielens:{}", (0.5, 0.5))):
        with pytest.raises(LabError, match=r"^validation and test should be above 0 and leave a part for training, but are"):
            data.load(spec.format(tmp_path / "a.txt"), split="lines", shares=shares)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("a b c")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "open", refuse)
    for kind in ("sequences", "words", "movielens"):
        with pytest.raises(LabError, match=f"^{re.escape(str(file))} cannot be read: Permission denied.$"):
            data.load(f"{kind}:{file}")


# --- movielens:PATH ---------------------------------------------------------------------------------------------------

# user, movie, rating, time: user 3 comes first, the movies 30 and 10 of user 1 have one time, in this order.
RATINGS = [
    *((3, 20, "4", 500), (1, 20, "5", 900), (1, 30, "3", 700), (1, 10, "4", 700)),
    *((3, 10, "1", 300), (3, 30, "2", 400), (1, 40, "5", 1000), (3, 20, "2.5", 600)),
]
OF_USERS = [["30", "10", "20", "40"], ["10", "30", "20", "20"]]
TITLES = {10: "Léon (1994)", 20: "Emma (1996)", 30: "Emma (1996)", 99: "Never, Seen (1999)"}
NAMED = [
    ["Emma (1996) [30]", "Léon (1994)", "Emma (1996) [20]", "40"],
    ["Léon (1994)", "Emma (1996) [30]", "Emma (1996) [20]", "Emma (1996) [20]"],
]


def write_ratings(folder, form, titles=False):
    folder.mkdir(exist_ok=True)
    separator = {"ratings.dat": "::", "u.data": "\t", "ratings.csv": ","}[form]
    lines = [separator.join(map(str, each)) for each in RATINGS]
    if form == "ratings.csv":
        lines = ["userId,movieId,rating,timestamp", *lines]
    (folder / form).write_text("\n".join(lines) + "\n")
    if titles:
        if form == "ratings.dat":
            made = [f"{movie}::{title}::Drama|Comedy" for movie, title in TITLES.items()]
        elif form == "u.data":
            made = [f"{movie}|{title}|01-Jan-1995||http://a|0|1" for movie, title in TITLES.items()]
        else:
            made = ["movieId,title,genres", *(f'{movie},"{title}",Drama' for movie, title in TITLES.items())]
        name = {"ratings.dat": "movies.dat", "u.data": "u.item", "ratings.csv": "movies.csv"}[form]
        (folder / name).write_text("\n".join(made) + "\n", encoding="utf-8" if form == "ratings.csv" else "latin-1")
    return folder / form


def shown(dataset, wanted):
    """The sequences that are expected, with `?` for what is no class."""
    return [[name if name in dataset.classes else "?" for name in each] for each in wanted]


@pytest.mark.parametrize("form", ["ratings.dat", "u.data", "ratings.csv"])
def test_users_are_sequences_in_the_order_of_the_times(tmp_path, form):
    file = write_ratings(tmp_path / "ml-tiny", form)
    dataset = data.load(f"movielens:{file}")
    assert (dataset.name, dataset.kind, dataset.tokens) == ("ml-tiny", "sequences", "items")
    assert dataset.classes == ("10", "30")
    assert read_back(dataset) == shown(dataset, OF_USERS)
    assert data.load(f"movielens:{file.parent}").fingerprint == dataset.fingerprint


@pytest.mark.parametrize("form", ["ratings.dat", "u.data", "ratings.csv"])
def test_titles_are_the_names(tmp_path, form):
    write_ratings(tmp_path / "ml", form, titles=True)
    dataset = movielens.load(tmp_path / "ml")
    assert set(dataset.classes) == {"Léon (1994)", "Emma (1996) [30]"}
    assert read_back(dataset) == shown(dataset, NAMED)


def test_whole_users_by_share(tmp_path):
    lines = [f"{user}::{movie}::5::{movie}" for user in range(100, 120) for movie in range(1, 5)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines))
    dataset = data.load(f"movielens:{tmp_path}", split="lines")
    by_hash = sequences.parts_by_hash([str(user) for user in range(100, 120)], (0.1, 0.2))
    assert parts_of(dataset) == dict(enumerate(by_hash))


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        *(("ratings.dat", f"1::{wrong}") for wrong in ("2::3", "2::3::4::5", "two::3::4", "9999999999999999999::3::4")),
        ("u.data", "1 2 3 4"),
        ("ratings.csv", "1,2,3"),
    ],
)
def test_ratings_that_are_malformed(tmp_path, form, wrong):
    file = write_ratings(tmp_path, form)
    with file.open("a") as opened:
        opened.write(f"{wrong}\n")
    with pytest.raises(LabError) as error:
        movielens.load(file)
    assert str(error.value).startswith(f"{file}, line {10 if form == 'ratings.csv' else 9}: ")
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("userId,movieId,rating,timestamp\n", "is empty"),
        ("1 2 3 4\n", "line 1: .* got '1 2 3 4'"),
        ("1,2,3,4\n", "line 1: .* header .* got '1,2,3,4'"),
    ],
)
def test_files_that_are_no_ratings(tmp_path, content, message):
    (tmp_path / "ratings.csv").write_text(content)
    with pytest.raises(LabError, match=rf"ratings\.csv.*{message}"):
        movielens.load(tmp_path)


@pytest.mark.parametrize(
    ("form", "titles", "content", "message"),
    [
        ("ratings.dat", "movies.dat", b"1::A\nx::B\n", "line 2: .* got 'x::B'"),
        ("u.data", "u.item", b"10\n", "line 1: .* got '10'"),
        ("ratings.csv", "movies.csv", b'movieId,title\n1,"A\n2,B\n', "line 4: unexpected end of data"),
        ("ratings.csv", "movies.csv", b"", "line 1: .* got ''"),
        ("ratings.csv", "movies.csv", "movieId,title\n10,Léon\n".encode("latin-1"), "is not in UTF-8: save it as UTF-8"),
    ],
)
def test_titles_that_are_malformed(tmp_path, form, titles, content, message):
    write_ratings(tmp_path, form)
    (tmp_path / titles).write_bytes(content)
    with pytest.raises(LabError, match=f"{titles}.*{message}"):
        movielens.load(tmp_path)


def test_folders_without_ratings_or_with_several(tmp_path):
    with pytest.raises(LabError, match=r"has none of ratings.dat, u.data, ratings.csv: name a folder that has one"):
        movielens.load(tmp_path)
    write_ratings(tmp_path, "ratings.dat")
    write_ratings(tmp_path, "ratings.csv")
    with pytest.raises(LabError, match=r"has ratings.dat and ratings.csv: name the file"):
        movielens.load(tmp_path)
    assert len(movielens.load(tmp_path / "ratings.csv").test) == 2


# --- words:PATH -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, said the Dogs' owner.", ["Don't", "stop", ",", "said", "the", "Dogs", "'", "owner", "."]),
        ("rock’n’roll (1969)\tété", ["rock’n’roll", "(", "1969", ")", "été"]),
        ("__a_b ...", ["_", "_", "a", "_", "b", ".", ".", "."]),
        ("cafe\u0301 हिन्दी", ["café", "हिन्दी"]),
        ("  ", []),
    ],
)
def test_words_and_marks(text, expected):
    assert sequences.words_of(text) == expected


def write_texts(folder, count):
    """So many files of four lines, each with words of its own and `the cat sat` in all of them."""
    folder.mkdir(exist_ok=True)
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"the cat sat.\n\nthe own{n} cat sat\nown{n} own{n}\nthe cat!\n")
    return folder


def test_whole_files_are_divided(tmp_path):
    folder = write_texts(tmp_path / "texts", 20)
    (folder / "deep").mkdir()
    (folder / "0.txt").rename(folder / "deep" / "0.md")
    (folder / ".hidden.txt").write_text("never " * 9)
    (folder / "table.csv").write_text("never " * 9)
    (folder / "empty.txt").write_text(" \n")
    dataset = data.load(f"words:{folder}")
    assert (dataset.name, dataset.kind, dataset.tokens) == ("texts", "sequences", "words")
    files = [*(f"{n}.txt" for n in range(1, 20)), "deep/0.md"]
    files.sort()
    by_hash = dict(zip(files, sequences.parts_by_hash(files, (0.1, 0.2)), strict=True))
    assert list(parts_of(dataset).values()).count(2) == 4
    assert [parts_of(dataset)[row] for row in range(20)] == [by_hash[file] for file in files]
    own = {f"own{file.split('/')[-1].split('.')[0]}" for file in files if by_hash[file] == 0}
    assert set(dataset.classes) == {"the", "cat", "sat", ".", "!"} | own  # each file's own word is there three times
    assert dataset.classes[:3] == ("cat", "the", "sat")
    first = int(files[0].split(".")[0])
    whole = f"the cat sat . the own{first} cat sat own{first} own{first} the cat !".split()
    assert read_back(dataset)[0] == shown(dataset, [whole])[0]
    # Of 12 tokens with one before them, 3 are no classes: they are no targets, and are said.
    assert len(dataset.test) == 4 * 9
    assert dataset.test.groups.unique().numel() == 4
    assert [remark.split(": ")[1] for remark in dataset.remarks] == ["1.", "25.0%."]


@pytest.mark.parametrize(
    ("files", "said"),
    [(1, "There is one file"), (4, "4 files are too few to be divided")],
)
def test_lines_are_divided_where_there_are_few_files(tmp_path, files, said):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(files):
        (folder / f"{n}.txt").write_text("\n".join(["the cat sat", "", f"the cat number{n}"] * 20))
    dataset = data.load(f"words:{folder}")
    assert dataset.remarks[0] == f"{said}: whole lines are for training, validation or the test."
    assert len(dataset.train.begins) - 1 == files * 40
    keys = [f"{n}.txt:{line}" for n in range(files) for line in range(1, 61) if line % 3 != 2]
    assert parts_of(dataset) == dict(enumerate(sequences.parts_by_hash(keys, (0.1, 0.2))))
    asked = data.load(f"words:{folder}", split="lines")
    assert torch.equal(asked.test.places, dataset.test.places)
    assert asked.remarks == dataset.remarks[1:]


def test_words_that_occur_three_times_in_the_training_part(tmp_path):
    parts = sequences.parts_by_hash([f"book.txt:{n}" for n in range(1, 21)], (0.1, 0.2))
    rare = {0: iter(["twice", "twice", "thrice", "thrice", "thrice"]), 1: iter([]), 2: iter(["tested"] * 4)}
    lines = [f"so it {next(rare[part], 'goes')}" for part in parts]
    (tmp_path / "book.txt").write_text("\n".join(lines))
    assert data.load(f"words:{tmp_path / 'book.txt'}").classes == ("it", "so", "goes", "thrice")


def test_at_most_so_many_words(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "MOST_WORDS", 3)
    (tmp_path / "book.txt").write_text("so so it goes .\n" * 30)
    dataset = data.load(f"words:{tmp_path / 'book.txt'}")
    assert dataset.classes == ("so", ".", "goes")
    assert "25.0%" in dataset.remarks[1]


def test_texts_that_cannot_be(tmp_path):
    with pytest.raises(LabError, match=r"has no \.txt or \.md files"):
        data.load(f"words:{tmp_path}")
    file = tmp_path / "a.txt"
    for content, message in (
        (b"", "a.txt has no words: it should be plain text"),
        (b"one two three\n" * 2 + b"four five\n" * 2, "a.txt has no word that occurs 3 times in its training part, but two"),
        (b"one\n" * 30, "a.txt has one word that occurs 3 times in its training part, but two are needed: give more text"),
    ):
        file.write_bytes(content)
        with pytest.raises(LabError, match=message):
            data.load(f"words:{file}")
    with pytest.raises(LabError, match=r"^split last is for sequences of items; words are divided by file, or by line with"):
        data.load(f"words:{file}", split="last")


def test_thousands_of_accents_in_a_row_take_no_time():
    """To put them into their order is quadratic: they are left as they are."""
    accents = "\u0316\u0301" * 15_000
    begun = time.process_time()
    assert sequences.words_of(f"a{accents} b") == [f"a{accents}", "b"]
    assert time.process_time() - begun < 0.5  # seconds; 3 where they are put in order
    assert sequences.words_of("e\u0301" + "\u0316\u0301" * 100) == ["\u00e9" + "\u0316" * 100 + "\u0301" * 100]
