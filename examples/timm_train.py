"""timm's train loop, with its optimiser, schedule, mixup, moving average and loss scaler.

The loop is that of timm's train.py. Its loss is computed outside of the model and may be scaled and divided, so the
lines that belong to Attemper, which are marked, say by what.

python examples/timm_train.py --epochs 20 --recipe "dropkey(0.1, until=0.8) + explicit(v=1e-4)"
"""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch.utils.data import DataLoader

import attemper
from digits import digits


def main(recipe: str, epochs: int, samples: int | None = None, accumulate: int = 2) -> float:
    """Train, and return the accuracy of the averaged model on the test data."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = digits(samples)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=48, num_heads=4, depth=4, num_classes=10
    ).to(device)
    tempered = attemper.apply(model, recipe, auto_penalty=True)  # 1. before the optimiser, and before the average
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    updates = len(loader) // accumulate
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=1, updates_per_epoch=updates, step_on_epochs=False
    )
    mixup, criterion = Mixup(mixup_alpha=0.2, num_classes=10), SoftTargetCrossEntropy()
    scaler = NativeScaler(device=device.type) if device.type == "cuda" else None
    # 2. what the loop multiplies its loss with
    tempered.loss_scale = lambda: (scaler.state_dict()["scale"] if scaler else 1.0) / accumulate

    done = 0
    for epoch in range(epochs):
        model.train()
        for at, (images, classes) in enumerate(loader):
            if at // accumulate == updates:  # a last part of a step
                break
            mixed, targets = mixup(images.to(device), classes.to(device))
            tempered.progress(min(done / (epochs * updates), 1.0), epochs=epochs)  # 3. for rates that change over time
            last = (at + 1) % accumulate == 0
            with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
                loss = criterion(model(mixed), targets) / accumulate
            if scaler is not None:
                scaler(loss, optimizer, parameters=model.parameters(), need_update=last)
            else:
                loss.backward()
                if last:
                    optimizer.step()
            if last:
                optimizer.zero_grad()
                average.update(model)
                done += 1
                scheduler.step_update(num_updates=done)
        print(f"epoch {epoch + 1}: loss {loss.item() * accumulate:.3f}")

    images, classes = (part.to(device) for part in test.tensors)
    average.module.eval()
    with torch.no_grad():
        accuracy = (average.module(images).argmax(-1) == classes).float().mean().item()
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1, until=0.8) + explicit(v=1e-4)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2)
    main(**vars(parser.parse_args()))
