"""What every rank of a test's team needs, imported once for all of them."""

import accelerate
import pytest
import timm
import torch
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp
import torchmetrics.classification

import attemper.lab.evaluation.runs
import attemper.lab.study
import attemper.lab.training.loop
from attemper.lab.tasks.registry import open_task

torch.set_num_threads(1)  # threads that tensors are computed with here would not be there in a process that is forked
open_task("digits(train=200, test=50)")
open_task("shapes")
MODULES = (accelerate, pytest, timm, torch, torchmetrics, attemper)
