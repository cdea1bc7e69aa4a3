"""A training loop of one's own: the three lines that belong to Attemper are marked.

python examples/plain_loop.py --epochs 20 --recipe "dropkey(0.1, until=0.8) + consistency(0.5)"
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import attemper
from digits import digits


def main(recipe: str, epochs: int, samples: int | None = None) -> float:
    """Train, and return the accuracy on the test data."""
    torch.manual_seed(0)
    train, test = digits(samples)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=48, num_heads=4, depth=4, num_classes=10
    )
    tempered = attemper.apply(model, recipe)  # 1. before the optimiser
    print(tempered)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps, step = epochs * len(loader), 0

    for epoch in range(epochs):
        model.train()
        for images, classes in loader:
            tempered.progress(step / steps, epochs=epochs)  # 2. for rates that change over time
            loss = tempered.loss(  # 3. penalties and comparisons of passes included
                lambda images=images: model(images), lambda logits, classes=classes: F.cross_entropy(logits, classes)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    images, classes = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == classes).float().mean().item()
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1, until=0.8) + consistency(0.5)")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
