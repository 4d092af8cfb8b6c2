"""torchmetrics beside anyk's metrics: the same numbers, and where they differ.

pip install anyk torchmetrics
python examples/torchmetrics_beside.py
"""

import torch

try:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install torchmetrics") from None

import anyk

CLASSES, KS = 100, (1, 5, 10)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = MetricCollection({str(k): MulticlassAccuracy(CLASSES, top_k=k, average="micro") for k in KS})
    hits, seen = dict.fromkeys(KS, 0), 0
    for batch_size in (64, 64, 17):  # counts add up over batches of any size, averages do not
        target = torch.randint(CLASSES, (batch_size,), generator=generator)
        scores = torch.randn(batch_size, CLASSES, generator=generator)
        scores[torch.arange(batch_size), target] += 2
        theirs.update(scores, target)
        hits = {k: hits[k] + count.item() for k, count in anyk.topk_hits(scores, target, KS).items()}
        seen += batch_size
    values = theirs.compute()
    for k in KS:
        print(f"top-{k}: torchmetrics {values[str(k)]:.6f}, anyk {hits[k] / seen:.6f}")

    # A model that knows nothing gives equal scores. anyk counts ties against it; torchmetrics takes the first classes it finds.
    scores, target = torch.zeros(CLASSES, CLASSES), torch.arange(CLASSES)
    them = MulticlassAccuracy(CLASSES, top_k=5, average="micro")(scores, target)
    print(f"all scores equal, top-5: torchmetrics {them:.2f}, anyk {anyk.topk_accuracy(scores, target, (5,))[5]:.2f}")


if __name__ == "__main__":
    main()
