"""Hugging Face's Trainer with a callback: gradients are those of a plain loop, rates follow, evaluation is as ever."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import attemper
from attemper.errors import ConflictError, ParameterError, PenaltyError

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from attemper.integrations.transformers import TemperCallback, TemperMixin, TemperTrainer  # noqa: E402
from attemper.tempering.automatic import predicts_next  # noqa: E402

SAMPLES = 20
PENALTY = "explicit(v=0.3, ff=0.2)"


def vit(trial=None):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config).double()


def images():
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [{"pixel_values": image, "labels": at % 3} for at, image in enumerate(pixels)]


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForTokenClassification(config).double()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def texts():
    """Sentences of which a very different number of words counts."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for at in range(SAMPLES):
        words = torch.randint(5, 30, (7,), generator=generator)
        labels = torch.where(torch.arange(7) < 2 + at % 6, words % 3, -100)
        found.append({"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels})
    return found


class Watch(TrainerCallback):
    """Seeds every step, and keeps gradients and rates."""

    def __init__(self):
        self.gradients, self.rates = [], []

    def on_step_begin(self, args, state, control, model=None, **given):
        torch.manual_seed(100 + state.global_step)
        self.rates.append([row.rate for row in attemper.Tempered.of(model).summary() if row.method == "dropkey"])

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        self.gradients.append([p.grad.clone() for p in model.parameters()])


def trainer_of(kind, model, data, folder, *callbacks, steps=1, **options):
    seen = options.pop("trainer", {})
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=3, gradient_accumulation_steps=steps, max_grad_norm=0.0,
        train_sampling_strategy="sequential", report_to="none", use_cpu=True, disable_tqdm=True,
        **({"num_train_epochs": 1, "save_strategy": "no", "learning_rate": 1e-3, "optim": "adamw_torch"} | options),
    )  # fmt: skip
    return kind(model=model, args=args, train_dataset=data, callbacks=list(callbacks), **seen)


def batches(data, steps):
    """The batches of every step of the optimiser."""
    whole = [data[at : at + 3] for at in range(0, len(data), 3)]
    collated = [{name: torch.stack([torch.as_tensor(x[name]) for x in batch]) for name in batch[0]} for batch in whole]
    return [collated[at : at + steps] for at in range(0, len(collated), steps)]


def by_hand(model, data, recipe, steps, smoothing=0.0):
    """The gradients of every step, in a loop of our own.

    Every batch counts by its share of what counts in its step. BERT's loss is a mean in any case, so there the trainer
    adds the means of the batches up, and the penalties with them.
    """
    tempered = attemper.apply(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    groups = batches(data, steps)
    shifted = isinstance(model, LlamaForCausalLM)
    gradients = []
    for at, group in enumerate(groups):
        for each in optimizer.param_groups:
            each["lr"] = 1e-3 * (1 - at / len(groups))
        torch.manual_seed(100 + at)
        targets = [F.pad(b["labels"][:, 1:], (0, 1), value=-100) if shifted else b["labels"] for b in group]
        items = sum(int(each.ne(-100).sum()) for each in targets)
        for batch, labels in zip(group, targets, strict=True):
            inputs = {name: x for name, x in batch.items() if name != "labels"}

            def criterion(out, labels=labels):
                return F.cross_entropy(out.logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)

            counted = labels.ne(-100) if labels.dim() > 1 else None
            loss = tempered.loss(lambda inputs=inputs: model(**inputs), criterion, counted)
            share = 1.0 if isinstance(model, BertForTokenClassification) else int(labels.ne(-100).sum()) / items
            (loss * share).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def assert_same(given, wanted, factor=1.0, tolerance=1e-7):
    assert len(given) == len(wanted)
    for ours, theirs in zip(given, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other * factor, rtol=1e-6, atol=tolerance * factor)


CASES = {"images": (vit, images), "words": (bert, texts), "next words": (llama, texts)}


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_callback_brings_penalties_at_the_scale_of_the_loss(case, steps, tmp_path):
    build, data = CASES[case]
    watch = Watch()
    trainer_of(Trainer, build(), data(), tmp_path, TemperCallback(PENALTY), watch, steps=steps).train()
    assert_same(watch.gradients, by_hand(build(), data(), PENALTY, steps))
    assert any(
        (one - other).abs().max() > 1e-4
        for one, other in zip(watch.gradients[0], by_hand(build(), data(), "none", steps)[0], strict=True)
    )


@pytest.mark.parametrize("recipe", [PENALTY, f"dropkey(0.3) + consistency(0.5) + {PENALTY}"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_of_ours_brings_comparisons_too(case, steps, recipe, tmp_path):
    build, data = CASES[case]
    watch = Watch()
    trainer_of(TemperTrainer, build(), data(), tmp_path, TemperCallback(recipe), watch, steps=steps).train()
    assert_same(watch.gradients, by_hand(build(), data(), recipe, steps))


@pytest.mark.parametrize("kind", [Trainer, TemperTrainer])
def test_a_loss_scaler_scales_penalties_as_it_scales_the_loss(kind, tmp_path):
    watch = Watch()
    trainer = trainer_of(kind, vit(), images(), tmp_path, TemperCallback(PENALTY), watch, steps=2, max_steps=1)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    wanted = by_hand(vit(), images(), PENALTY, 2)[:1]
    assert_same(watch.gradients, wanted, factor=1024.0)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_outside_of_the_model_is_right_or_refused(steps, tmp_path):
    watch = Watch()
    options = {"steps": steps, "label_smoothing_factor": 0.1}
    trainer_of(TemperTrainer, vit(), images(), tmp_path, TemperCallback(PENALTY), watch, **options).train()
    assert_same(watch.gradients, by_hand(vit(), images(), PENALTY, steps, smoothing=0.1))
    other = Watch()
    trainer = trainer_of(Trainer, vit(), images(), tmp_path, TemperCallback(PENALTY), other, **options)
    if steps == 1:
        trainer.train()
        assert_same(other.gradients, watch.gradients)
    else:
        with pytest.raises(PenaltyError, match="TemperTrainer"):
            trainer.train()


def test_a_loss_function_of_the_users_own_is_right_under_accumulation(tmp_path):
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    watch = Watch()
    trainer_of(
        TemperTrainer, vit(), images(), tmp_path, TemperCallback(PENALTY), watch, steps=4,
        trainer={"compute_loss_func": compute_loss_func},
    ).train()  # fmt: skip
    assert_same(watch.gradients, by_hand(vit(), images(), PENALTY, 4))


def test_a_recipe_that_adds_nothing_trains_as_the_plain_trainer_bit_for_bit(tmp_path):
    plain, tempered = vit(), vit()
    trainer_of(Trainer, plain, images(), tmp_path, steps=2).train()
    trainer_of(TemperTrainer, tempered, images(), tmp_path, TemperCallback("dropkey(0)"), steps=2).train()
    for one, other in zip(plain.parameters(), tempered.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["dropkey(0.4, until=0.5)", "dropkey(0.4, until=1)"])
def test_rates_follow_the_steps_of_the_optimiser(recipe, tmp_path):
    watch = Watch()
    trainer_of(
        Trainer, vit(), images(), tmp_path, TemperCallback(recipe), watch, steps=2, num_train_epochs=2
    ).train()  # 4 steps an epoch
    assert [rates[0] for rates in watch.rates] == [0.4] * 4 + [0.0] * 4


def test_times_in_epochs_are_right_where_the_length_is_given_in_steps(tmp_path):
    watch = Watch()
    trainer_of(
        Trainer, vit(), images(), tmp_path, TemperCallback("dropkey(0.4, until=1)"), watch, steps=2, max_steps=6
    ).train()
    assert [rates[0] for rates in watch.rates] == [0.4] * 4 + [0.0] * 2


def test_a_resumed_training_goes_on_with_its_rates_and_ends_with_the_same_weights(tmp_path):
    recipe = "dropkey(0.4, until=0.75) + cb(cb_s) + explicit(v=0.1)"
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5}
    whole, again, watch = bert(), bert(), Watch()
    trainer_of(Trainer, whole, texts(), tmp_path, TemperCallback(recipe), Watch(), **options).train()
    trainer = trainer_of(Trainer, again, texts(), tmp_path, TemperCallback(recipe), watch, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert len(watch.rates) == 14 - 5
    assert [rates[0] for rates in watch.rates] == [0.4 if step < 0.75 * 14 else 0.0 for step in range(5, 14)]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Trainer, TemperTrainer])
def test_evaluation_and_probes_inside_of_training_change_nothing_of_it(kind, tmp_path):
    recipe, data = "dropkey(0.4) + explicit(v=0.1)", images()
    quiet, busy = vit(), vit()
    trainer_of(kind, quiet, data, tmp_path, TemperCallback(recipe), Watch()).train()
    callback = TemperCallback(recipe, probes=["entropy", "logits"], probe_every=2)
    options = {"eval_strategy": "steps", "eval_steps": 1, "trainer": {"eval_dataset": data}}
    trainer = trainer_of(
        kind, busy, data, tmp_path, callback, Watch(), **options
    )  # a loader draws from torch's generator
    trainer.train()
    for one, other in zip(quiet.parameters(), busy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sorted(callback.tables) == [0, 2, 4, 6]
    plain = vit()
    plain.load_state_dict(busy.state_dict())
    wanted = trainer_of(Trainer, plain, data, tmp_path, trainer={"eval_dataset": data}).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == wanted


@pytest.mark.parametrize("kind", [Trainer, TemperTrainer])
def test_rates_penalties_and_probes_stand_in_the_log(kind, tmp_path):
    lines = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **given):
            lines.append(dict(logs))

    callback = TemperCallback("dropkey(0.4, until=0.5) + explicit(v=0.1)", probes="entropy")
    trainer = trainer_of(kind, vit(), images(), tmp_path, callback, Tracker(), logging_steps=1)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["attemper/rate/dropkey"] for line in steps] == [0.4] * 4 + [0.0] * 3
    assert all(line["attemper/penalty/explicit"] > 0 for line in steps)
    assert [line["step"] for line in trainer.state.log_history if "attemper/entropy" in line] == [0, 7]
    assert sum("attemper/rate/dropkey" in line for line in lines) == 7


def test_a_model_that_is_tempered_already_needs_no_recipe(tmp_path):
    model, watch = vit(), Watch()
    attemper.apply(model, PENALTY)
    trainer_of(Trainer, model, images(), tmp_path, TemperCallback(), watch).train()
    assert_same(watch.gradients, by_hand(vit(), images(), PENALTY, 1))


def test_models_that_the_trainer_makes_are_tempered_before_their_optimiser(tmp_path):
    seen = {"model_init": vit}
    trainer = trainer_of(TemperTrainer, None, images(), tmp_path, TemperCallback("cb(cb_s)"), trainer=seen)
    trainer.train()
    learnt = [p for name, p in trainer.model.named_parameters() if name.startswith("attemper.")]
    assert learnt
    assert any(p.abs().max() > 0 for p in learnt)
    trainer = trainer_of(Trainer, None, images(), tmp_path, TemperCallback("dropkey(0.1)"), trainer=seen)
    trainer.train()
    assert attemper.Tempered.of(trainer.model) is not None
    trainer = trainer_of(Trainer, None, images(), tmp_path, TemperCallback("cb(cb_s)"), trainer=seen)
    with pytest.raises(ConflictError, match="TemperTrainer"):
        trainer.train()


def test_what_a_callback_cannot_do_is_refused_where_the_trainer_is_made(tmp_path):
    with pytest.raises(ConflictError, match=r"consistency compares passes.*TemperTrainer"):
        trainer_of(Trainer, vit(), images(), tmp_path, TemperCallback("consistency(0.5)"))
    with pytest.raises(ParameterError, match="auto_penalty"):
        TemperCallback("cb", auto_penalty=True)
    with pytest.raises(ParameterError, match="probe_every"):
        TemperCallback("cb", probe_every=0)


def test_the_mixin_stands_before_a_trainer_of_the_users_own(tmp_path):
    class Halving(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (0.5 * loss, outputs) if return_outputs else 0.5 * loss

    class Mine(TemperMixin, Halving):
        pass

    watch, other = Watch(), Watch()
    trainer_of(Mine, vit(), images(), tmp_path, TemperCallback("explicit(v=0.5)"), watch, max_steps=1).train()
    trainer_of(Trainer, vit(), images(), tmp_path, TemperCallback("explicit(v=1.0)"), other, max_steps=1).train()
    assert_same(watch.gradients, other.gradients, factor=0.5)


def test_a_copy_of_the_trained_model_is_the_plain_one_after_remove(tmp_path):
    model = vit()
    callback = TemperCallback("dropkey(0.4)")
    trainer_of(Trainer, model, images(), tmp_path, callback, max_steps=1).train()
    twin = copy.deepcopy(model)
    callback.tempered.remove()
    assert type(model) is ViTForImageClassification
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("kind", [vit, bert, llama, "t5"])
def test_whose_labels_are_shifted_is_known_as_the_trainer_knows_it(kind, tmp_path):
    if kind == "t5":
        config = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        model = T5ForConditionalGeneration(config)
    else:
        model = kind()
    trainer = trainer_of(Trainer, model, texts(), tmp_path)
    assert predicts_next(model) == trainer._loss_shifts_labels


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(tmp_path):
    recipe = "dropkey(0.3) + explicit(v=0.3) + consistency(0.5)"
    script = Path(__file__).with_name("trainer_ranks.py")
    found = []
    for count in (1, 2):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        told = subprocess.run(
            [*words, str(script), recipe], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found.append([json.loads(line[5:]) for line in told.stdout.splitlines() if line.startswith("sums ")])
    assert len(found[0]) == len(found[1]) == 2
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
