"""Fine-tuning with LoRA under Hugging Face's Trainer: penalties act on the weights with their adapters.

A model is first trained on the digits 0 to 4. Then its adapters and a new head learn the digits 5 to 9, and everything
else stays as it is. With a model of the Hub, begin at `get_peft_model`.

python examples/lora.py --epochs 20 --recipe "dropkey(0.1) + explicit(v=1e-4) + consistency(0.5)"
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from attemper.integrations.transformers import TemperCallback, TemperTrainer
from digits import digits


def classes_of(part, first: int) -> list[dict]:
    """The samples of five classes in a row, counted from 0."""
    return [
        {"pixel_values": image, "labels": int(label) - first}
        for image, label in part
        if first <= int(label) < first + 5
    ]


def fit(model, data, recipe: str, epochs: int) -> TemperCallback:
    """Train; a recipe with consistency needs TemperTrainer in the place of Trainer."""
    callback = TemperCallback(recipe)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=3e-3, report_to="none",
            save_strategy="no", logging_steps=20,
        )  # fmt: skip
        TemperTrainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()
    return callback


def main(recipe: str, epochs: int, samples: int | None = None) -> float:
    """Pre-train, fine-tune, and return the accuracy on test data of the new classes."""
    set_seed(0)
    train, test = digits(samples)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=96, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    base = ViTForImageClassification(config)
    fit(base, classes_of(train, 0), "dropkey(0.1)", epochs).tempered.remove()
    base.classifier = torch.nn.Linear(config.hidden_size, 5)

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    fit(model, classes_of(train, 5), recipe, epochs).tempered.remove()

    merged = model.merge_and_unload().eval()
    held_out = classes_of(test, 5)
    images = torch.stack([sample["pixel_values"] for sample in held_out]).to(merged.device)
    labels = torch.tensor([sample["labels"] for sample in held_out], device=merged.device)
    with torch.no_grad():
        return (merged(images).logits.argmax(-1) == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1) + explicit(v=1e-4) + consistency(0.5)")
    parser.add_argument("--epochs", type=int, default=20)
    print(f"test accuracy {main(**vars(parser.parse_args())):.3f}")
