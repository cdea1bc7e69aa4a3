"""Accelerate: the same loop on one device or on many. The lines that belong to Attemper are marked.

python examples/accelerate_loop.py --epochs 20
accelerate launch --num_processes 2 examples/accelerate_loop.py --epochs 20
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import attemper
from digits import digits


def main(recipe: str, epochs: int, samples: int | None = None) -> float:
    """Train, and return the accuracy on the test data."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    train, test = digits(samples)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=48, num_heads=4, depth=4, num_classes=10
    )
    tempered = attemper.apply(model, recipe)  # 1. before prepare, which may wrap the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    network, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps, step = epochs * len(loader), 0

    for epoch in range(epochs):
        network.train()
        for images, classes in loader:
            with accelerator.accumulate(network):
                tempered.progress(step / steps, epochs=epochs)  # 2. for rates that change over time
                loss = tempered.loss(  # 3. the loss is whole, so accumulation and scaling need no word
                    lambda images=images: network(images),
                    lambda logits, classes=classes: F.cross_entropy(logits, classes),
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    images, classes = (part.to(accelerator.device) for part in test.tensors)
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == classes).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1, until=0.8) + explicit(v=1e-4)")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
