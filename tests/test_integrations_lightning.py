"""Lightning's Trainer with a callback: gradients are those of a loop by hand, rates follow, evaluation is as ever."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import ParameterError, RecipeWarning

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from attemper.integrations.lightning import TemperCallback  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
PENALTY = "explicit(v=0.3, ff=0.2)"
BATCHES = 6


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))


def data(count=4 * BATCHES - 2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.DataLoader([(each, at % 3) for at, each in enumerate(x)], batch_size=4)


class Classifier(L.LightningModule):
    automatic = True

    def __init__(self):
        super().__init__()
        self.model = encoder().double()
        self.automatic_optimization = self.automatic
        self.gradients, self.rates = [], []

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_batch_start(self, batch, index):
        torch.manual_seed(100 + self.current_epoch * BATCHES + index)
        rates = [row.rate for row in attemper.Tempered.of(self.model).summary() if row.method == "dropkey"]
        self.rates += rates[:1]

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])


class Comparing(Classifier):
    def training_step(self, batch, index):
        x, y = batch
        return attemper.Tempered.of(self).loss(lambda: self(x), lambda out: F.cross_entropy(out, y))


class ByHand(Classifier):
    """Does its steps itself, without dividing the loss."""

    automatic = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def fit(module, folder, *callbacks, resume=None, validation=None, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    trainer = L.Trainer(
        accelerator="cpu", callbacks=list(callbacks), default_root_dir=str(folder), enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, data(), validation, ckpt_path=resume)
    return trainer


def by_hand(recipe, steps):
    """The gradients of every step; each batch is divided by the number of batches, as Lightning does it."""
    model = encoder().double().train()
    tempered = attemper.apply(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []
    whole = list(data())
    for at, (x, y) in enumerate(whole):
        torch.manual_seed(100 + at)
        (tempered.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y)) / steps).backward()
        if (at + 1) % steps == 0 or at + 1 == len(whole):
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def assert_same(given, wanted):
    assert len(given) == len(wanted)
    for ours, theirs in zip(given, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_penalties_come_at_the_scale_of_the_loss(steps, tmp_path):
    module = Classifier()
    fit(module, tmp_path, TemperCallback(PENALTY), accumulate_grad_batches=steps)
    assert_same(module.gradients, by_hand(PENALTY, steps))
    plain = by_hand("none", steps)[0]
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(module.gradients[0], plain, strict=True))


class Scaling(MixedPrecision):
    """Scales losses as for float16, and computes in the model's own precision."""

    @contextlib.contextmanager
    def forward_context(self):
        yield


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_scaler_scales_penalties_as_it_scales_the_loss(steps, tmp_path):
    module = Classifier()
    plugin = Scaling("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(module, tmp_path, TemperCallback(PENALTY), accumulate_grad_batches=steps, plugins=[plugin])
    # gradients are unscaled by the time that hooks see them
    assert_same(module.gradients, by_hand(PENALTY, steps))


def test_steps_by_hand_are_not_divided(tmp_path):
    module = ByHand()
    fit(module, tmp_path, TemperCallback(PENALTY))
    assert_same(module.gradients, by_hand(PENALTY, 1))


@pytest.mark.parametrize("kind", [Classifier, Comparing])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_of_the_users_own_counts_once(kind, steps, tmp_path):
    recipe = f"dropkey(0.3) + {PENALTY}" + (" + consistency(0.5)" if kind is Comparing else "")
    module = kind()
    fit(module, tmp_path, TemperCallback(recipe), accumulate_grad_batches=steps)
    assert_same(module.gradients, by_hand(recipe, steps))


def test_a_comparison_that_training_step_leaves_out_is_an_error(tmp_path):
    with pytest.raises(attemper.errors.PenaltyError, match=r"consistency or rdrop acts in loss = tempered\.loss"):
        fit(Classifier(), tmp_path, TemperCallback("dropkey(0.1) + consistency(0.5)"))


@pytest.mark.parametrize("until", ["0.5", "1"])
def test_rates_follow_the_steps_of_the_optimiser(until, tmp_path):
    module = Classifier()
    fit(module, tmp_path, TemperCallback(f"dropkey(0.4, until={until})"), max_epochs=2, accumulate_grad_batches=2)
    assert module.rates == [0.4] * BATCHES + [0.0] * BATCHES


def test_rates_over_time_need_an_end(tmp_path):
    with pytest.raises(ParameterError, match="max_steps"):
        fit(Classifier(), tmp_path, TemperCallback("dropkey(0.4, until=0.5)"), max_epochs=-1)


def test_a_resumed_training_goes_on_with_its_rates_and_ends_with_the_same_weights(tmp_path):
    recipe = "dropkey(0.4, until=0.75) + cb(cb_s) + explicit(v=0.1)"
    whole, again = Classifier(), Classifier()
    saver = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    options = {"max_epochs": 2, "enable_checkpointing": True}
    fit(whole, tmp_path, TemperCallback(recipe), saver, **options)
    path = str(tmp_path / "step=6.ckpt")
    fit(again, tmp_path, TemperCallback(recipe), resume=path, max_epochs=2)
    assert again.rates == [0.4 if step < 0.75 * 2 * BATCHES else 0.0 for step in range(6, 2 * BATCHES)]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.warns(RecipeWarning, match="trained with 'dropkey"):
        fit(Classifier(), tmp_path, TemperCallback("cb(cb_s)"), resume=path, max_epochs=2)


def test_validation_and_probes_inside_of_training_change_nothing_of_it(tmp_path):
    recipe = "dropkey(0.4) + explicit(v=0.1)"
    quiet, busy = Classifier(), Classifier()
    fit(quiet, tmp_path, TemperCallback(recipe))
    callback = TemperCallback(recipe, probes=["entropy"], probe_every=2)
    trainer = fit(busy, tmp_path, callback, validation=data(), val_check_interval=2)
    for one, other in zip(quiet.parameters(), busy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sorted(callback.tables) == [0, 2, 4, 6]
    plain = encoder().double().eval()
    plain.load_state_dict(busy.model.state_dict())
    with torch.no_grad():
        losses = [(F.cross_entropy(plain(x), y).item(), len(y)) for x, y in data()]
    wanted = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    found = trainer.validate(busy, data(), verbose=False)[0]["val_loss"]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_rates_penalties_and_probes_reach_the_loggers(tmp_path):
    logger = CSVLogger(tmp_path)
    callback = TemperCallback("dropkey(0.4, until=0.5) + explicit(v=0.1)", probes="entropy")
    fit(Classifier(), tmp_path, callback, logger=logger, log_every_n_steps=2)
    header, *lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    rates = [float(row["attemper/rate/dropkey"]) for row in rows if row["attemper/rate/dropkey"]]
    assert rates == pytest.approx([0.4, 0.0, 0.0])
    assert sum(bool(row["attemper/penalty/explicit"]) for row in rows) == 3
    assert sum(bool(row["attemper/entropy"]) for row in rows) == 2


def test_the_part_that_is_tempered_can_be_named(tmp_path):
    module = Classifier()
    callback = TemperCallback("dropkey(0.4)", module="model.0")
    fit(module, tmp_path, callback)
    assert callback.tempered.model is module.model[0]
    with pytest.raises(ParameterError, match="no module 'net'; its own are: model"):
        fit(Classifier(), tmp_path, TemperCallback("dropkey(0.4)", module="net"))


def test_what_changes_the_architecture_acts_in_a_test_without_training(tmp_path):
    module = Classifier()
    x, _ = next(iter(data()))
    before = module.eval()(x)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[TemperCallback("cb")])
    trainer.validate(module, data(), verbose=False)
    assert not torch.allclose(module.eval()(x), before)
