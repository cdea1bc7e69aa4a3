"""torchvision: grids of its vision transformer and windows of its Swin."""

from torch import nn

from attemper.sites.adapter import from_library, pair
from attemper.sites.base import Geometry


class TorchvisionAdapter:
    """What torchvision's models tell; see `Adapter`."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        if not from_library(owner, "torchvision"):
            return None
        window = pair(getattr(attention, "window_size", None))
        if window is not None:
            return Geometry(window)
        size, patch = getattr(owner, "image_size", None), getattr(owner, "patch_size", None)
        if not isinstance(size, int) or not isinstance(patch, int):
            return None
        return Geometry((size // patch, size // patch), prefix=1, class_token=True)

    def leave_alone(self, module: nn.Module) -> str | None:
        return None


ADAPTER = TorchvisionAdapter()
