"""The loss in Hugging Face's Trainer, by its argument compute_loss_func: a small BERT from nothing, on made sentences.

pip install anyk transformers accelerate
python examples/hf_trainer.py
"""

import tempfile

import torch

try:
    import accelerate  # noqa: F401  the Trainer needs it
    from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments, set_seed
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install transformers accelerate") from None

import anyk

CLASSES, WORDS, LENGTH = 50, 200, 12
P_K = [0.5, 0, 0, 0, 0.5]


def topk_loss(outputs, labels, num_items_in_batch=None):
    """The Trainer says how many examples an optimiser step has in all: that is what a sum is divided by."""
    total = anyk.topk_error(outputs["logits"], labels, P_K, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    scores, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
    return {f"top{k}": value.item() for k, value in anyk.topk_accuracy(scores, labels, ks=(1, 5)).items()}


def sentences(number: int, topics: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Half of the words are from the topic's ten, half are any."""
    labels = torch.randint(CLASSES, (number,))
    words = topics[labels].gather(1, torch.randint(10, (number, LENGTH)))
    words = torch.where(torch.rand(number, LENGTH) < 0.5, words, torch.randint(WORDS, (number, LENGTH)))
    return [{"input_ids": ids, "labels": label} for ids, label in zip(words, labels, strict=True)]


def main() -> None:
    set_seed(0)
    torch.set_num_threads(1)
    topics = torch.rand(CLASSES, WORDS).topk(10).indices
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes)
    training = {
        "num_train_epochs": 4,
        "per_device_train_batch_size": 50,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
    }
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, dataloader_pin_memory=False, **training, **quiet)
        model = BertForSequenceClassification(config)
        ours = {"compute_loss_func": topk_loss, "compute_metrics": metrics}
        trainer = Trainer(model, arguments, train_dataset=sentences(4000, topics), eval_dataset=sentences(500, topics), **ours)
        trainer.train()
        found = trainer.evaluate()
    print(f"evaluation: loss {found['eval_loss']:.3f}, top-1 {found['eval_top1']:.3f}, top-5 {found['eval_top5']:.3f}")


if __name__ == "__main__":
    main()
