import json
import math

import numpy as np
import pytest

from anyk.lab import report, verdict
from anyk.lab.config import RunConfig
from anyk.lab.findings import Findings, Method, SeedRun
from anyk.lab.tune import Trial

EXAMPLES = 1000


def method(name, hits, role="method", seeds=5, validation=None, rng=None, late=0.0, of="", ended="", at_bounds=()):
    """A method whose runs have the class first on a share of the test examples, and second on most others."""
    rng = rng or np.random.default_rng(0)
    easy = np.random.default_rng(7).permutation(EXAMPLES)
    runs = []
    for seed in range(1, seeds + 1):
        ranks = np.full(EXAMPLES, 2)
        count = round(hits * EXAMPLES)
        ranks[easy[:count]] = 1
        noise = rng.random(EXAMPLES) < 0.02
        ranks[noise] = 3 - ranks[noise]
        test = {"top1": float((ranks == 1).mean()), "top2": float((ranks <= 2).mean()), "mrr": float((1 / ranks).mean())}
        held = {"mean": hits if validation is None else validation, "top1": hits}
        runs.append(SeedRun(seed, {"learning_rate": 0.1}, test, held, {"top1": 1.0}, 1.0, 3.0, f"runs/{name}-{seed}", ranks))
    config = RunConfig(loss=name if role != "control" else "softmax", learning_rate=0.1, epochs=3, p_k=(0.5, 0.5))
    trials = tuple(Trial({"learning_rate": 0.1 * i, "temperature": 2.0}, 0.125, 0, hits - 0.01 * i) for i in range(1, 4))
    return Method(name, role, f"what {name} is", config, tuple(runs) if seeds else (), trials, at_bounds, late, ended, of)


def findings(*methods, ks=(1,), **more):
    base = method("softmax", 0.6, "baseline", rng=np.random.default_rng(1))
    data = {"name": "made", "classes": 10, "train": 700, "validation": 200, "test": EXAMPLES, "most_frequent": 0.1, "fingerprint": "f"}
    reference = Method("most frequent", "reference", "always the most frequent", None, ())
    settings = more.pop("settings", {"label_noise": 0.0})
    return Findings((base, *methods, reference), ks, "mean", {**data, **more.pop("data", {})}, settings, **more)


def test_a_gain_is_confirmed_and_chosen():
    found = findings(method("error", 0.65), method("gce", 0.6, rng=np.random.default_rng(3)))
    assert found.chosen.name == "error" and found.decided and [one.name for one in found.confirmed] == ["error"]
    one = found.differences["error", "top1"]
    assert math.isclose(one.difference, 0.05, abs_tol=0.02) and one.p_holm < 0.01 and one.low < one.difference < one.high
    assert verdict.headline(found).startswith("error is better than softmax")


def test_no_difference_is_an_answer():
    found = findings(method("error", 0.6, rng=np.random.default_rng(5)))
    assert found.decided and found.chosen.name == "softmax" and "may be luck" in verdict.headline(found)


def test_a_loss_is_not_chosen():
    found = findings(method("splitter", 0.5))
    assert found.chosen.name == "softmax" and "softmax is better than splitter" in verdict.headline(found)


def test_the_best_on_validation_is_picked_and_not_the_best_on_the_test():
    found = findings(method("error", 0.65, validation=0.5), method("lapsum", 0.6, validation=0.7))
    assert found.picked.name == "lapsum" and found.chosen.name == "softmax"
    assert "error gains on the test" in verdict.headline(found)
    noisy = findings(method("error", 0.65, validation=0.5), method("lapsum", 0.6, validation=0.7), settings={"label_noise": 0.4})
    assert noisy.picked.name == noisy.chosen.name == "error"


def test_a_control_that_has_it_all_is_told():
    control = method("softmax, trained as error", 0.66, "control", of="error", rng=np.random.default_rng(9))
    found = findings(method("error", 0.65), control)
    assert "softmax, trained as error has all of that, too" in verdict.headline(found)
    weak = method("softmax, trained as error", 0.6, "control", of="error", rng=np.random.default_rng(9))
    assert "too" not in verdict.headline(findings(method("error", 0.65), weak))


def test_differences_are_over_the_seeds_that_both_have():
    found = findings(method("error", 0.65, seeds=3))
    assert found.differences["error", "top1"].seeds == 3
    assert found.confirmed == []  # it has no result on two seeds


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ended": "--time 1m ended the tuning of error"}, "--time 1m"),
        ({"seeds": 0}, "no other loss"),
        ({"seeds": 2}, "--seeds 5"),
    ],
)
def test_what_is_missing_is_said(changes, says):
    found = findings(method("error", 0.65, **changes))
    assert not found.decided and says in verdict.headline(found) and found.chosen.name == "softmax"


def test_a_later_look_is_at_a_smaller_level():
    first, later = findings(method("error", 0.65)), findings(method("error", 0.65), look=3)
    assert first.level == 0.04 and later.level == 0.0025
    wide, narrow = (one.differences["error", "top1"] for one in (later, first))
    assert wide.high - wide.low > narrow.high - narrow.low
    assert any("look 3" in sentence for sentence in verdict.sentences(later))


def test_a_test_set_that_can_decide_nothing_is_told():
    found = findings(method("error", 0.6), data={"test": 5})
    assert "5 test examples are too few" in found.too_few_examples
    groups = findings(method("error", 0.6), data={"test_groups": 4})
    assert "4 groups" in groups.too_few_examples


def test_groups_of_test_examples_widen_the_interval():
    own = findings(method("error", 0.65)).differences["error", "top1"]
    order = np.random.default_rng(7).permutation(EXAMPLES)
    groups = np.empty(EXAMPLES, int)
    groups[order] = np.arange(EXAMPLES) // 50
    together = findings(method("error", 0.65), groups=groups).differences["error", "top1"]
    assert together.high - together.low > 1.5 * (own.high - own.low)


def test_where_nothing_is_learned_it_says_so():
    found = findings(method("error", 0.6), data={"most_frequent": 0.6})
    assert verdict.headline(found).startswith("Nothing is learned")


def test_remarks():
    found = findings(method("error", 0.65, late=0.02, at_bounds=("temperature 8, the largest that is tried",)))
    told = " ".join(verdict.sentences(found))
    assert "--epochs 6" in told and "tuned to its bound: temperature 8" in told
    gap = findings(method("error", 0.9, validation=0.9))
    strange = Findings((method("softmax", 0.2, "baseline", validation=0.9), *gap.methods[1:]), (1,), "mean", gap.data, {})
    softmax = strange.methods[0]
    object.__setattr__(softmax, "runs", tuple(SeedRun(**{**vars(run), "validation": {"top1": 0.9, "mean": 0.9}}) for run in softmax.runs))
    assert "more than their sizes explain" in " ".join(verdict.sentences(strange))


def test_the_terminal_has_at_most_25_lines_and_the_verdict_first():
    found = findings(method("gce", 0.61), method("error", 0.65), ks=(1, 2))
    lines = verdict.terminal(found, "report.html")
    assert len(lines) <= 25 and lines[0] == verdict.headline(found)
    assert any("criterion = " in line for line in lines) and lines[-1] == "Report: report.html"
    head = lines[2].split()
    assert head == ["%", "top-1", "Δ", "interval", "p", "top-2", "Δ", "interval", "p"]


def test_what_was_best_so_far_is_pasted_where_nothing_is_decided():
    lines = verdict.terminal(findings(method("error", 0.7, seeds=2)))
    assert any("the best so far" in line for line in lines)


def test_json_has_all_numbers_and_no_paths():
    found = findings(method("error", 0.65))
    content = json.loads(json.dumps(found.to_json()))
    assert content["format"] == 3 and content["chosen"] == "error" and content["look"] == 1 and len(content["looks"]) == 1
    error = next(row for row in content["methods"] if row["name"] == "error")
    assert error["difference"]["top1"]["seeds"] == 5 and len(error["runs"]) == 5 and "command" not in content


def test_lists_of_guesses_and_classes():
    labels = np.arange(EXAMPLES) % 2
    found = findings(method("error", 0.65), labels=labels, class_names=("a", "b"))
    assert found.guesses_for(found.method("error")) == {50: 1, 80: 2, 90: 2, 95: 2, 99: 2}
    rows = found.by_class(found.method("error"), "top1")
    assert {row[0] for row in rows} == {"a", "b"} and sum(row[1] for row in rows) == EXAMPLES
    for name, _, before, after in rows:
        own = labels == ("a", "b").index(name)
        assert math.isclose(after, np.mean([(run.ranks[own] == 1).mean() for run in found.method("error").runs]))
        assert math.isclose(before, np.mean([(run.ranks[own] == 1).mean() for run in found.baseline.runs]))


def test_the_report_says_the_same_first_and_escapes_names():
    found = findings(method("error", 0.65), data={"name": "<script>alert(1)</script>"}, labels=np.arange(EXAMPLES) % 2, class_names=("<b>", "b"))
    page = report.render(found)
    assert "<script>alert" not in page and "&lt;b&gt;" in page and "https://" not in page.replace("http://www.w3.org", "")
    assert page.index("error is better than softmax") < page.index("<table>")
    for words in ("Use it", "Tuning", "By class", "training, top-1", "criterion = "):
        assert words in page
