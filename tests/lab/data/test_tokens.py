"""Sequences of tokens: contexts, windows and the ways to divide them, against slow loops over lists."""

import random

import pytest
import torch

from anyk.lab.data import cache, tokens
from anyk.lab.data.tokens import IGNORED, OUT_OF_VOCABULARY, SequenceSplit, Windows
from anyk.lab.errors import LabError

CLASSES = tuple("abcdef")
OTHER, PADDING = 6, 7


def made(seed, *, shortest=1, longest=12, count=9):
    """Random sequences of six classes and some other tokens, as lists of numbers, and as a stream with its begins."""
    pick = random.Random(seed)
    lists = [[pick.randrange(OTHER + 1) for _ in range(pick.randint(shortest, longest))] for _ in range(pick.randint(3, count))]
    begins = [0]
    for each in lists:
        begins.append(begins[-1] + len(each))
    stream = torch.tensor([token for each in lists for token in each], dtype=torch.int32)
    return lists, stream, torch.tensor(begins)


def examples_of(split):
    """(sequence, place in it, label) of each example, by looking for the sequence one by one."""
    begins = split.begins.tolist()
    found = []
    for place, label in zip(split.places.tolist(), split.labels.tolist(), strict=True):
        row = next(n for n in range(len(begins) - 1) if begins[n] <= place < begins[n + 1])
        found.append((row, place - begins[row], label))
    return found


def divided(stream, begins, parts=None, groups=None, *, classes=CLASSES, out_of_vocabulary=True, **facts):
    """A data set of which whole sequences are divided, or without ``parts`` the last token of each is the test."""
    part = tokens.last_parts(begins) if parts is None else tokens.parts_of_tokens(parts, begins)
    return tokens.dataset_of("made", classes, stream, begins, part, groups, out_of_vocabulary=out_of_vocabulary, **facts)


# --- numbers and words ------------------------------------------------------------------------------------------------


def test_a_number_of_texts_is_the_same_on_every_machine():
    assert [tokens.number(("anyk", name)) for name in ("a", "b", "ä")] == [8, 21, 15]  # as sha256sum has it
    assert tokens.number(("a", "b")) != tokens.number(("ab",))
    wide = [tokens.number(("anyk", str(n)), 1000) for n in range(300)]
    assert max(wide) > 900
    assert min(wide) >= 0
    assert max(wide) < 1000


def spelled(*sequences):
    made = tokens.Corpus()
    for sequence in sequences:
        made.add(sequence)
    return made


def test_the_vocabulary_is_by_frequency_then_by_the_alphabet():
    words = ["b", "a", "b", "c", "a", "d"]

    def classes(words, *limits, **more):
        return spelled(words).encode(torch.ones(len(words), dtype=torch.bool), *limits, **more)[0]

    assert classes(words) == ("a", "b", "c", "d")
    assert classes(["b", *words]) == ("b", "a", "c", "d")
    assert classes(words, 3) == ("a", "b", "c")
    assert classes(words, 3, least=2) == ("a", "b")
    assert classes(words, 1, least=2) == ("a",)


def test_numbers_of_sequences():
    made = spelled(["b", "?"], [], ["a", "b", "a"])
    classes, stream = made.encode(torch.tensor([True, False, True, True, True]))
    assert classes == ("a", "b")
    assert (stream.tolist(), stream.dtype) == ([1, 2, 0, 1, 0], torch.int32)
    assert (made.begins.tolist(), made.begins.dtype) == ([0, 2, 2, 5], torch.int64)


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_contexts_and_what_was_seen(seed):
    lists, stream, begins = made(seed)
    places = torch.arange(len(stream))
    split = SequenceSplit((stream,), stream.long(), places=places, begins=begins, padding=PADDING)
    whole = [(row, place) for row, each in enumerate(lists) for place in range(len(each))]
    index = torch.randperm(len(stream), generator=torch.Generator().manual_seed(seed))
    for length in (1, 2, 5, 20):
        expected = []
        for n in index.tolist():
            row, place = whole[n]
            expected.append(([PADDING] * length + lists[row][:place])[-length:])
        found = split.contexts(index, length)
        assert (found.tolist(), found.dtype) == (expected, torch.int64)
    rows, classes = split.seen(places[index])
    pairs = [
        (number, token)
        for number, n in enumerate(index.tolist())
        for token in lists[whole[n][0]][: whole[n][1]]
        if token < OTHER
    ]
    assert list(zip(rows.tolist(), classes.tolist(), strict=True)) == pairs


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("seed", range(8))
def test_windows_have_every_target_once_an_epoch(seed, length):
    lists, stream, begins = made(seed, longest=20)
    split = examples_from_second(stream, begins)
    pick = random.Random(seed)
    index = torch.tensor(sorted(pick.sample(range(len(split)), max(1, len(split) // 2))))
    windows = Windows(split, index, length)
    generator = torch.Generator().manual_seed(seed)
    epochs = set()
    for _ in range(4):
        rows = windows.shifted(generator)
        assert len(rows) == len(windows)
        epochs.add(tuple(rows[:, 0].tolist()))
        read, labels, places = windows.take(rows)
        assert read.shape == labels.shape == places.shape == (len(windows), length)
        trained = labels != IGNORED
        assert sorted(places[trained].tolist()) == split.places[index].tolist()
        assert torch.equal(labels[trained], stream[places[trained]].long())
        check_reading(lists, begins.tolist(), read, labels, places)
    # A window is shifted from epoch to epoch; of one token, only whether it comes before the sequence or after it.
    assert len(epochs) > 1


def examples_from_second(stream, begins):
    """All tokens that have another before them, as examples; the others of a sequence are no classes, but count here."""
    first = set(begins.tolist())
    places = torch.tensor([place for place in range(len(stream)) if place not in first])
    return SequenceSplit((stream,), stream[places].long(), places=places, begins=begins, padding=PADDING)


def check_reading(lists, begins, read, labels, places):
    """At a target, the model has read the tokens before it that fit into the window, and padding before these."""
    for tokens_read, row_labels, row_places in zip(read.tolist(), labels.tolist(), places.tolist(), strict=True):
        for column, (label, place) in enumerate(zip(row_labels, row_places, strict=True)):
            if label != IGNORED:
                row = max(n for n in range(len(lists)) if begins[n] <= place)
                before = lists[row][: place - begins[row]]
                assert tokens_read[: column + 1] == ([PADDING] * (column + 1) + before)[-(column + 1) :]


def test_every_place_of_a_window_is_trained_where_sequences_are_short():
    """A model is asked at the last place. It must have learned there, though validation and test keep the last two tokens."""
    _, stream, begins = made(3, shortest=4, longest=9)
    dataset = divided(stream, begins)
    windows = Windows(dataset.train, dataset.training, 12)
    generator = torch.Generator().manual_seed(0)
    trained = sum((windows.take(windows.shifted(generator))[1] != IGNORED).sum(0) for _ in range(60))
    assert bool((trained > 0).all()), trained


def test_windows_of_sequences_without_a_target_are_left_out():
    _, stream, begins = made(1, shortest=6)
    split = examples_from_second(stream, begins)
    of_second = ((split.places >= begins[1]) & (split.places < begins[2])).nonzero().flatten()
    windows = Windows(split, of_second, 3)
    assert len(windows) == (int(begins[2] - begins[1]) - 1) // 3 + 1


# --- divided ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["whole", "whole, only classes", "last"])
@pytest.mark.parametrize("seed", range(6))
def test_sequences_are_divided(seed, way):
    lists, stream, begins = made(seed, shortest=4 if way != "last" else 1, longest=12 if way != "last" else 7)
    parts = [0, 1, 2, *(random.Random(seed).randrange(3) for _ in lists[3:])]
    groups = torch.tensor([7 * row for row in range(len(lists))])
    unseen = way != "whole, only classes"
    dataset = divided(
        stream, begins, None if way == "last" else parts, groups, out_of_vocabulary=unseen, remarks=["First."], tokens="items"
    )
    expected = {part: [] for part in range(3)}
    for row, each in enumerate(lists):
        for place, token in list(enumerate(each))[1:]:
            part = parts[row]
            if way == "last":
                part = {len(each) - 1: 2, len(each) - 2: 1}.get(place, 0) if len(each) >= 3 else 0
            if token < OTHER:
                expected[part].append((row, place, token))
            elif unseen and part:
                expected[part].append((row, place, OUT_OF_VOCABULARY))
    train = examples_of(dataset.train)
    assert [train[n] for n in dataset.training] == expected[0]
    assert [train[n] for n in dataset.validation] == expected[1]
    assert examples_of(dataset.test) == expected[2]
    assert dataset.test.groups.tolist() == [7 * row for row, _, _ in expected[2]]
    assert dataset.train.groups.tolist() == [7 * row for row, _, _ in train]
    assert (dataset.kind, dataset.classes, dataset.tokens) == ("sequences", CLASSES, "items")
    assert dataset.train.padding == dataset.test.padding == PADDING
    first, *others = dataset.remarks
    assert first == "First."
    outside = sum(label == OUT_OF_VOCABULARY for _, _, label in expected[2])
    tested = [token == OTHER for row, each in enumerate(lists) if parts[row] == 2 for token in each[1:]]
    share = f"{sum(tested) / max(len(tested), 1):.1%}."
    expected_end = f"{outside} of {len(expected[2])}." if unseen else share
    assert [remark.split(": ")[1] for remark in others] == ([expected_end] if (outside if unseen else any(tested)) else [])


@pytest.mark.parametrize(
    ("classes", "parts", "message"),
    [
        ((), None, "no kind of token to guess in its training part, but at least two"),
        (("a",), None, "one kind of token"),
        (("a", "b"), None, "no token to guess for validation: give more or longer sequences"),
        (("a", "b"), [0, 1], "no token to guess for the test"),
        (("a", "b"), [1, 2], "no token to guess for training"),
    ],
)
def test_too_little_to_guess(classes, parts, message):
    stream, begins = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 4])
    with pytest.raises(LabError, match=f"^made has {message}"):
        divided(stream, begins, parts, classes=classes)


def test_a_set_of_sequences_is_kept_whole(tmp_path):
    _, stream, begins = made(5, shortest=4)
    built = divided(stream, begins, remarks=["So it is."], tokens="items")
    first = cache.remember(tmp_path / "set.safetensors", lambda: built)
    again = cache.remember(tmp_path / "set.safetensors", lambda: pytest.fail("it was built again"))
    assert again.fingerprint == first.fingerprint
    assert (again.remarks, again.tokens, again.classes) == (built.remarks, "items", CLASSES)
    for old, new in ((built.train, again.train), (built.test, again.test)):
        assert isinstance(new, SequenceSplit)
        assert new.padding == old.padding
        for name in ("labels", "groups", "places", "begins", "stream"):
            assert torch.equal(getattr(old, name), getattr(new, name)), name
    assert torch.equal(built.validation, again.validation)
