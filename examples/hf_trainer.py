"""Hugging Face's Trainer: the two lines that belong to Attemper are marked.

python examples/hf_trainer.py --epochs 20 --recipe "dropkey(0.1, until=0.8) + explicit(v=1e-4)"
"""

import argparse
import tempfile

import numpy as np
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from attemper.integrations.transformers import TemperCallback  # 1.
from digits import digits


def main(recipe: str, epochs: int, samples: int | None = None) -> float:
    """Train, and return the accuracy on the test data."""
    set_seed(0)
    train, test = ([{"pixel_values": image, "labels": int(label)} for image, label in part] for part in digits(samples))
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=96, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip

    def accuracy(prediction) -> dict[str, float]:
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, gradient_accumulation_steps=2,
            learning_rate=2e-3, logging_steps=20, report_to="none", save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
            callbacks=[TemperCallback(recipe, probes=["entropy", "logits"])],  # 2.
        )  # fmt: skip
        trainer.train()
        return float(trainer.evaluate()["eval_accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dropkey(0.1, until=0.8) + explicit(v=1e-4)")
    parser.add_argument("--epochs", type=int, default=20)
    print(f"test accuracy {main(**vars(parser.parse_args())):.3f}")
