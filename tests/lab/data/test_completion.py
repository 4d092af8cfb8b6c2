"""Code completion, on a small library that is made here."""

import token as kinds
import tokenize

import pytest

from anyk.lab import data
from anyk.lab.data import completion
from anyk.lab.errors import LabError

# Modules by the part that the hash of their names gives them, which may never change.
TRAIN, VALIDATION, TEST = ("abc", "ast", "re", "bisect"), ("os", "pydoc"), ("json", "pprint")


@pytest.fixture
def library(tmp_path):
    """Eight modules. What `rare` is named is in one part alone."""
    folder = tmp_path / "lib"
    for place, module in enumerate((*TRAIN, *VALIDATION, *TEST)):
        rare = "trained" if module in TRAIN else "new"
        body = f"def f{place}(x):\n    return x + {rare}\n"
        if place % 2:
            (folder / module / "deeper").mkdir(parents=True)
            (folder / module / "__init__.py").write_text(body)
            (folder / module / "deeper" / "more.py").write_text("y = x\n")
        else:
            folder.mkdir(exist_ok=True)
            (folder / f"{module}.py").write_text(body)
    return folder


def load(library, classes=12):
    return completion.load(classes, library=library)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_of_python():
    source = b"x = 'one' 'two'  # three\nif x:\n\n    y = [\n        1.5,\n    ]\n"
    assert " ".join(completion.python_tokens(source)) == (
        "x = <string> <string> <newline> if x : <newline> <indent> y = [ <number> , ] <newline> <dedent>"
    )


@pytest.mark.parametrize(
    "source", [b"(", b"x = '''open", b"if x:\n        y\n    z\n", b"\xff\xfe = 1", b"# coding: no-such\n"]
)
def test_what_is_not_python_has_no_tokens(source):
    assert list(completion.python_tokens(source)) == []


def test_an_f_string_is_one_token():
    source = b"a = f'{b:{c}} d' + rf'''{e}\n''' + g\n"
    assert list(completion.python_tokens(source)) == ["a", "=", "<string>", "+", "<string>", "+", "g", "<newline>"]


def test_an_f_string_is_one_token_where_python_has_several(monkeypatch):
    """As Python 3.12 and later cut `a + f"{f'{b}'} c" + d`; this one may be older."""
    start, middle, end = 901, 902, 903
    cut = [
        *((kinds.ENCODING, "utf-8"), (kinds.NAME, "a"), (kinds.OP, "+")),
        *((start, 'f"'), (kinds.OP, "{"), (start, "f'"), (kinds.OP, "{"), (kinds.NAME, "b"), (kinds.OP, "}"), (end, "'")),
        *((kinds.OP, "}"), (middle, " c"), (end, '"'), (kinds.OP, "+"), (kinds.NAME, "d"), (kinds.NEWLINE, "\n")),
    ]
    place = ((1, 0), (1, 0), "")
    monkeypatch.setattr(completion.tokenize, "tokenize", lambda _: [tokenize.TokenInfo(*each, *place) for each in cut])
    monkeypatch.setattr(completion, "_F_STRING_START", (start, -1))
    monkeypatch.setattr(completion, "_F_STRING_END", (end, -1))
    assert list(completion.python_tokens(b"")) == ["a", "+", "<string>", "+", "d", "<newline>"]


# --- the set ----------------------------------------------------------------------------------------------------------


def test_modules_keep_their_part():
    for part, modules in enumerate((TRAIN, VALIDATION, TEST)):
        assert {completion._part(module) for module in modules} == {part}


def test_whole_modules_are_divided(library, tmp_path):
    dataset = load(library)
    assert (dataset.name, dataset.kind, dataset.tokens) == ("completion:12", "sequences", "python")
    counts = [0, 0, 0]
    for part, modules in enumerate((TRAIN, VALIDATION, TEST)):
        for module in modules:
            for path in (*library.glob(f"{module}.py"), *library.glob(f"{module}/**/*.py")):
                # The first token has none before it, and what is no class is not to be guessed.
                known = [token in dataset.classes for token in completion.python_tokens(path.read_bytes())]
                counts[part] += sum(known[1:])
    found = [len(dataset.training), len(dataset.validation), len(dataset.test)]
    assert found == counts
    # A module is a group, with all files inside of it.
    files = sum(1 for _ in library.rglob("*.py"))
    assert len(dataset.train.begins) - 1 == files
    assert len(set(dataset.train.groups.tolist())) == len(TRAIN) + len(VALIDATION)
    assert len(set(dataset.test.groups.tolist())) == len(TEST)
    assert not set(dataset.train.groups.tolist()) & set(dataset.test.groups.tolist())


def test_the_vocabulary_is_of_the_training_part(library, tmp_path):
    dataset = load(library, 2000)
    assert "trained" in dataset.classes
    assert "new" not in dataset.classes
    assert dataset.classes[:2] == ("<newline>", "x")
    assert load(library, 5).classes == dataset.classes[:5]


def test_tests_tables_and_what_is_not_python_are_left_out(library, tmp_path):
    before = load(library)
    for name in ("test/a.py", "idlelib/b.py", "abc/test_c.py", "bz2/tests/d.py", "site-packages/e.py", "ast/f.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("wrong (" if name == "ast/f.py" else "left = out\n")
    assert load(library).fingerprint == before.fingerprint


def test_the_cache_is_used(library, tmp_path, monkeypatch):
    first = load(library)
    monkeypatch.setattr(completion, "python_tokens", lambda _: pytest.fail("the source was read again"))
    again = load(library)
    assert (again.fingerprint, again.remarks) == (first.fingerprint, first.remarks)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 1, 20_001])
def test_a_number_of_classes_that_cannot_be(library, tmp_path, classes):
    with pytest.raises(LabError, match=f"completion has 2 to 20,000 classes, but {classes:,} were asked for"):
        load(library, classes)


def test_a_library_without_source(tmp_path):
    with pytest.raises(LabError, match=r"completion reads the source .*, but .* has no \.py files"):
        load(tmp_path)


def test_words_for_it():
    with pytest.raises(LabError, match="completion:CLASSES wants a number of classes"):
        data.load("completion:many")
    with pytest.raises(LabError, match=r"^split lines is for files of sequences; completion is divided by module"):
        data.load("completion", split="lines")
