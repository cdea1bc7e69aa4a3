"""Activation checkpoints that a module begins inside of its own forward, and torch's wrappers for checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError, UnsupportedError
from plain_blocks import Attention, Block, model_of, tokens


class Inside(Attention):
    """Computes attention, or all of itself, in a checkpoint."""

    run = staticmethod(checkpoint)
    whole = written = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.written:
            return (q @ k.mT).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v)

    def everything(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.attend(q, k, v) if self.whole else self.run(self.attend, q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.everything, x) if self.whole else self.everything(x)


class CheckpointedBlock(Block):
    run = staticmethod(checkpoint)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(super().forward, x)


def losses_and_gradients(model: nn.Module, tempered: attemper.Tempered) -> list[Tensor]:
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        loss = tempered.loss(lambda: model(tokens().requires_grad_()), lambda out: out.square().mean())
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def without_checkpoint(function, *args, **how):
    return function(*args)


ON_ATTENTION = (
    "dropkey(0.5)", "dropkey(0.4, share=heads)", "hardmask(0.5, k=2)", "blur(2.0)", "drophead(0.5)",
    "dropattention(0.5)", "dropconnect(0.3)", "explicit(v=1)", "dropkey(learn)",
)  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ON_ATTENTION)
def test_attention_in_a_checkpoint_of_its_own_is_right_or_refused(recipe, reentrant):
    number = ON_ATTENTION.index(recipe)
    found = []
    for run in (functools.partial(checkpoint, use_reentrant=reentrant), without_checkpoint):

        def block(run=run) -> nn.Module:
            made = Block()
            made.attn = Inside()
            made.attn.run, made.attn.whole, made.attn.written = run, number % 2 == 0, number % 4 < 2
            return made

        model = model_of(block)  # type: ignore[arg-type]
        tempered = attemper.apply(model, recipe, targets={"attention": "*.attn"})
        if run is without_checkpoint:
            found.append(losses_and_gradients(model, tempered))
        else:
            try:
                found.append(losses_and_gradients(model, tempered))
            except UnsupportedError:
                return
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["dropkey(0.5)", "layerdrop(0.5)", "ffdropout(0.3)", "cb", "explicit(v=1, ff=1)"])
def test_what_a_block_that_checkpoints_itself_runs_again_acts_again(recipe, reentrant):
    if reentrant and "explicit" in recipe:
        pytest.skip("penalties need use_reentrant=False")
    run = functools.partial(checkpoint, use_reentrant=reentrant)
    found = []
    for each in (run, without_checkpoint):
        model = model_of(CheckpointedBlock)
        for block in model:
            block.run = each
        found.append(losses_and_gradients(model, attemper.apply(model, recipe)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["droppath(0.5)", "skipless", "skipless(mlp)"])
def test_sums_in_a_checkpoint_that_the_block_begins_are_refused(recipe, reentrant):
    model = model_of(CheckpointedBlock)
    for block in model:
        block.run = functools.partial(checkpoint, use_reentrant=reentrant)
    with pytest.raises(UnmetError, match="inside of an activation checkpoint"):
        losses_and_gradients(model, attemper.apply(model, recipe))


RECIPES = ("dropkey(0.5)", "droppath(0.5)", "skipless", "layerdrop(0.5)", "ffdropout(0.3)", "cb", "explicit(v=1, ff=1)")


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchs_wrapper_may_go_round_blocks_after_apply(recipe):
    found = []
    for wrap in (True, False):
        model = model_of(Block)
        tempered = attemper.apply(model, recipe)
        if wrap:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        found.append(losses_and_gradients(model, tempered))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
