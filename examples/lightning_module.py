"""The loss and the metrics in a Lightning module.

pip install anyk pytorch-lightning
python examples/lightning_module.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

try:
    import pytorch_lightning as pl
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install pytorch-lightning") from None

import anyk

CLASSES, WIDTH = 100, 32


class Classifier(pl.LightningModule):
    def __init__(self, p_k: dict[int, float]) -> None:
        super().__init__()
        self.model = torch.nn.Linear(WIDTH, CLASSES)
        self.criterion = anyk.TopKErrorLoss(p_k)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return self.criterion(self.model(x), y)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        x, y = batch
        accuracy = anyk.topk_accuracy(self.model(x), y, ks=(1, 5))
        self.log_dict({f"top{k}": value for k, value in accuracy.items()}, batch_size=len(y))  # averaged over the batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, WIDTH)
    y = torch.randint(CLASSES, (5000,))
    data = TensorDataset(centres[y] + 1.5 * torch.randn(5000, WIDTH), y)
    train, validation = torch.utils.data.random_split(data, [4000, 1000])
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier({1: 0.5, 5: 0.5}),
        DataLoader(train, batch_size=100, shuffle=True),
        DataLoader(validation, batch_size=500),
    )
    print(f"validation: top-1 {trainer.callback_metrics['top1']:.3f}, top-5 {trainer.callback_metrics['top5']:.3f}")


if __name__ == "__main__":
    main()
