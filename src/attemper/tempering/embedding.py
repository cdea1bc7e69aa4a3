"""What happens to the patches of an image before they become tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ConflictError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import PatchMap
from attemper.sites.base import Slot
from attemper.tempering.operands import input_in_front
from attemper.tempering.penalties import Control, hooks_saved_tensors
from attemper.tempering.subclassing import Action, state_of
from attemper.tempering.wrapped import is_outermost


@dataclass
class PatchAction(Action):
    """Maps the patches that an embedding is about to cut out of an image."""

    goes_outside: ClassVar[bool] = True
    """Where adapters are put round the layer, it acts round them."""

    control: Control
    place: Place
    method: Method
    patch: tuple[int, int]
    slot: Slot | None = None
    """Where the embedding stands, which others may wrap."""
    overlaps: bool = False
    """Whether the layer also sees pixels beyond a patch: it then gets the image that mapped patches make."""
    tokens: tuple[int, int] | None = None
    """How many tokens an image has, down and across, where that tells the patch."""

    def acts(self, training: bool) -> bool:
        return self.control.when != "never"

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not is_outermost(self, module):
            return forward(*args, **kwargs)
        args, kwargs = input_in_front(args, kwargs)
        image: Tensor = args[0]
        if self.overlaps:
            return forward(self.mapped_image(image), *args[1:], **kwargs)
        grid = (image.shape[-2] // self.patch[0], image.shape[-1] // self.patch[1])
        patches = cast(PatchMap, self.method).map_patches(to_patches(image, grid, self.patch))
        if state_of(module).original is nn.Conv2d and module.dilation == (1, 1) and module.groups == 1:
            # Of patches that are there already, the convolution is one product: to put the image together again and
            # to cut it up once more would take longer.
            weight = cast(Tensor, module.weight).flatten(1)
            embedded = F.linear(patches, weight, cast("Tensor | None", module.bias))
            return embedded.transpose(1, 2).unflatten(2, grid)
        return forward(from_patches(patches, image, grid, self.patch), *args[1:], **kwargs)

    def mapped_image(self, image: Tensor) -> Tensor:
        """The image with its patches mapped, put together again; pixels beyond the last whole patch stay."""
        if image.dim() != 4:
            raise ValueError(f"{self.method.name} maps patches of images (B, C, H, W), and got {tuple(image.shape)}")
        patch = self.patch if self.tokens is None else self.pixels_of_a_token(image)
        grid = (image.shape[-2] // patch[0], image.shape[-1] // patch[1])
        if min(grid) == 0:
            self.refuse(
                f"{self.method.name} maps patches of {patch[0]} × {patch[1]} pixels before {self.place.where}, and "
                f"this image has {image.shape[-2]} × {image.shape[-1]} pixels; write where=tokens"
            )
        rows, columns = grid[0] * patch[0], grid[1] * patch[1]
        inside = image[..., :rows, :columns]
        patches = cast(PatchMap, self.method).map_patches(to_patches(inside, grid, patch))
        mapped = from_patches(patches, inside, grid, patch)
        wide = torch.cat([mapped, image[..., :rows, columns:].to(mapped.dtype)], -1)
        return torch.cat([wide, image[..., rows:, :].to(mapped.dtype)], -2)

    def pixels_of_a_token(self, image: Tensor) -> tuple[int, int]:
        """By how many tokens there are."""
        assert self.tokens is not None
        rows, columns = self.tokens
        height, width = image.shape[-2], image.shape[-1]
        if height % rows or width % columns:
            self.refuse(
                f"{self.method.name} maps the patches that {rows} × {columns} tokens stand for, and images of "
                f"{height} × {width} pixels, as {self.place.where} gets, cannot be cut into so many; write where=tokens"
            )
        return height // rows, width // columns

    def refuse(self, why: str) -> NoReturn:
        """An image that was made up may have another size than the model wants, which is no reason to refuse it."""
        raise ValueError(why) if self.control.trial else ConflictError(why)


@dataclass
class ReuseAction(Action):
    """Embeds the same image once for all passes that are compared: up to the first block they are equal.

    If the image is changed in place between them, backward says so, as the gradient of the embedding needs it.
    """

    control: Control
    name: str

    def acts(self, training: bool) -> bool:
        return self.control.ledger.embedded is not None

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        memory = self.control.ledger.embedded
        args, kwargs = input_in_front(args, kwargs)
        # What is checkpointed runs once more in backward, where nothing is remembered: it must do the same now.
        if memory is None or not args or (not torch.compiler.is_compiling() and hooks_saved_tensors()):
            return forward(*args, **kwargs)
        if self.control.ledger.muted:
            for name, image, tokens in memory:
                if name == self.name and image is args[0]:
                    return tokens.clone()  # the model may add to its own in place
            return forward(*args, **kwargs)
        tokens = forward(*args, **kwargs)
        if tokens.requires_grad and cast(Tensor, module.weight).requires_grad:
            memory.append((self.name, args[0], tokens.clone()))
        return tokens


def to_patches(image: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """(B, N, C · height · width) from (B, C, H, W), patch by patch; what no whole patch covers is left out."""
    rows, columns = grid
    inside = image[..., : rows * patch[0], : columns * patch[1]]
    parts = inside.unflatten(-1, (columns, patch[1])).unflatten(-3, (rows, patch[0]))
    patches: Tensor = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return patches


def from_patches(patches: Tensor, like: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """The way back, to the shape of `like`; zeros where no whole patch is."""
    parts = patches.unflatten(2, (like.shape[1], *patch)).unflatten(1, grid)
    image = parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    height, width = (there - here for there, here in zip(like.shape[-2:], image.shape[-2:], strict=True))
    out: Tensor = F.pad(image, (0, width, 0, height)) if height or width else image
    return out
