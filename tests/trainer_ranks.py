"""Run by torchrun: tells the gradients of every step of a Trainer, which must not depend on how many processes run."""

import json
import os
import sys
import tempfile

import torch
from transformers import TrainerCallback, TrainingArguments

from attemper.integrations.transformers import TemperCallback, TemperTrainer
from test_integrations_transformers import images, vit


class Printing(TrainerCallback):
    def on_step_begin(self, args, state, control, **given):
        torch.manual_seed(100 + state.global_step)

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        if state.is_world_process_zero:
            sums = [p.grad.abs().sum().item() for p in model.parameters()]
            sys.stdout.write(f"sums {json.dumps(sums)}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, per_device_train_batch_size=4 // int(os.environ["WORLD_SIZE"]), gradient_accumulation_steps=2,
            max_grad_norm=0.0, optim="sgd", learning_rate=0.0, train_sampling_strategy="sequential", report_to="none",
            use_cpu=True, disable_tqdm=True, num_train_epochs=1, save_strategy="no",
        )  # fmt: skip
        data = images()[:16]
        TemperTrainer(
            model=vit(), args=options, train_dataset=data, callbacks=[TemperCallback(sys.argv[1]), Printing()]
        ).train()
