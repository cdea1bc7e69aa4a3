"""Transformers: image and patch sizes from a model's configuration, prefix tokens from its embeddings."""

from typing import Any

from torch import Tensor, nn

from attemper.sites.adapter import from_library, pair
from attemper.sites.base import Geometry, GridSource

TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


class TransformersAdapter:
    """What Transformers' models tell; see `Adapter`."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        if not from_library(owner, "transformers"):
            return None
        window = _window(attention)
        if window is not None:
            return Geometry(window)
        embeddings, config = getattr(owner, "embeddings", None), getattr(owner, "config", None)
        if not isinstance(embeddings, nn.Module) or _beyond_patches(embeddings, config):
            return None
        grid = _spectrogram(config) or _image(config)
        if grid is None:
            return None
        has_class_token = any(_count(embeddings, name) for name in TOKENS[:2])
        return Geometry(grid, sum(_count(embeddings, name) for name in TOKENS), has_class_token)

    def source(self, owner: nn.Module, attention: nn.Module) -> GridSource | None:
        """The convolution that makes patches, or that DETR and its like put in front of their encoder."""
        if not from_library(owner, "transformers") or _window(attention) is not None:
            return None
        projection, encoder = getattr(owner, "input_projection", None), getattr(owner, "encoder", None)
        if isinstance(projection, nn.Conv2d) and isinstance(encoder, nn.Module):
            return GridSource(projection) if _attends_to_map(owner, encoder, attention) else None
        known = self.geometry(owner, attention)
        patches: Any = getattr(owner, "embeddings", None)
        convolution = next((m for m in patches.modules() if isinstance(m, nn.Conv2d)), None) if known else None
        return None if known is None or convolution is None else GridSource(convolution, known.prefix)

    def leave_alone(self, module: nn.Module) -> str | None:
        return None


def _beyond_patches(embeddings: nn.Module, config: Any) -> bool:
    """Whether keys are not the patches of an image in their order: words stand before them, or some are hidden.

    So it is in ViLT, and in ViT-MAE, which shuffles the patches that it does not hide.
    """
    return hasattr(embeddings, "text_embeddings") or bool(getattr(config, "mask_ratio", 0))


def _window(attention: nn.Module) -> tuple[int, int] | None:
    """The window that attention is computed in, in Swin and its like."""
    if "Swin" not in type(attention).__name__:
        return None
    for holder in (attention, getattr(attention, "relative_position_bias", None)):
        window = pair(getattr(holder, "window_size", None))
        if window is not None:
            return window
    return None


def _image(config: Any) -> tuple[int, int] | None:
    size, patch = pair(getattr(config, "image_size", None)), pair(getattr(config, "patch_size", None))
    return (size[0] // patch[0], size[1] // patch[1]) if size and patch else None


def _spectrogram(config: Any) -> tuple[int, int] | None:
    """(frequency, time) steps of an audio spectrogram transformer."""
    names = ("num_mel_bins", "max_length", "patch_size", "frequency_stride", "time_stride")
    sizes = [size for name in names if isinstance(size := getattr(config, name, None), int)]
    if len(sizes) < len(names):
        return None
    mels, length, patch, frequency_stride, time_stride = sizes
    return (mels - patch) // frequency_stride + 1, (length - patch) // time_stride + 1


def _count(embeddings: nn.Module, name: str) -> int:
    """How many tokens of this name the embeddings put before the patches."""
    token = getattr(embeddings, name, None)
    if not isinstance(token, Tensor):
        return 0
    return token.shape[1] if token.dim() == 3 else 1


def _attends_to_map(owner: nn.Module, encoder: nn.Module, attention: nn.Module) -> bool:
    """Whether the keys are the places of the encoder's feature map: in it, and where a decoder looks at it."""
    if any(module is attention for module in encoder.modules()):
        return True
    layers = getattr(getattr(owner, "decoder", None), "layers", ())
    return any(getattr(layer, "encoder_attn", None) is attention for layer in layers)


ADAPTER = TransformersAdapter()
