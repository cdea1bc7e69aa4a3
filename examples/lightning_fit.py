"""Lightning: the two lines that belong to Attemper are marked.

python examples/lightning_fit.py --epochs 20 --recipe "dropkey(0.1, until=0.8) + explicit(v=1e-4)"
"""

import argparse

import lightning.pytorch as L
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from attemper.integrations.lightning import TemperCallback  # 1.
from digits import digits


class Classifier(L.LightningModule):
    """A ViT that learns classes; nothing in it knows of Attemper."""

    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model(
            "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=48, num_heads=4, depth=4,
            num_classes=10,
        )  # fmt: skip

    def training_step(self, batch, index):
        """The loss of a batch."""
        images, classes = batch
        loss = F.cross_entropy(self.model(images), classes)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, index):
        """The accuracy on a batch."""
        images, classes = batch
        self.log("accuracy", (self.model(images).argmax(-1) == classes).float().mean())

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(recipe: str, epochs: int, samples: int | None = None) -> float:
    """Train, and return the accuracy on the test data."""
    L.seed_everything(0)
    train, test = digits(samples)
    trainer = L.Trainer(
        max_epochs=epochs, accumulate_grad_batches=2, logger=False, enable_checkpointing=False, log_every_n_steps=10,
        callbacks=[TemperCallback(recipe)],  # 2.
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    return float(trainer.test(model, DataLoader(test, batch_size=64))[0]["accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1, until=0.8) + explicit(v=1e-4)")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
