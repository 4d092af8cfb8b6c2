import math

import torch
from torch import nn

from anyk.lab.evaluate import Evaluation, conformity, evaluate


def test_metrics_of_known_ranks():
    found = Evaluation(torch.tensor([1, 2, 6, 1]), torch.tensor([0, 0, 1, -1]), torch.empty(4, 0), 0.5).metrics((1, 5), (1, 5))
    assert found["top1"] == 0.25 and found["top5"] == 0.5 and found["mean"] == 0.375
    assert math.isclose(found["mrr"], (1 + 1 / 2 + 1 / 6) / 4)
    assert math.isclose(found["ndcg5"], (1 + 1 / math.log2(3)) / 4, rel_tol=1e-6)
    assert math.isclose(found["macro_top1"], (0.5 + 0 + 0) / 3) and found["cross_entropy"] == 0.5


def test_a_class_that_training_lacks_is_a_miss_and_ties_count_against_the_model():
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 0.0], [3.0, 2.0, 1.0]])
    model = nn.Linear(1, 1)  # a device is asked of its parameters
    model.forward = lambda index: scores[index]
    found = evaluate(model, lambda index: index, torch.tensor([2, 0, -1]), torch.arange(3), lambda s, index: s, guesses=2)
    assert found.ranks.tolist() == [1, 2, 4] and found.guesses[0].tolist() == [2, 1]
    log = torch.log_softmax(scores, 1)
    assert math.isclose(found.cross_entropy, float(-(log[0, 2] + log[1, 0]) / 2), rel_tol=1e-6)
    assert conformity(model, lambda index: index, torch.tensor([2, 0, -1]), torch.arange(3), lambda s, index: s)[2] == -math.inf
