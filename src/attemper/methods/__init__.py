"""The methods, one file each."""

from attemper.methods.arora import AroraDropout
from attemper.methods.base import Method, Place
from attemper.methods.blur import Blur
from attemper.methods.broadcast import ContextBroadcast
from attemper.methods.consistency import Consistency, RDrop
from attemper.methods.dropattention import DropAttention
from attemper.methods.dropconnect import DropConnect
from attemper.methods.drophead import DropHead
from attemper.methods.dropkey import DropKey
from attemper.methods.droppath import DropPath
from attemper.methods.explicit import ExplicitDropout
from attemper.methods.feedforward import FeedForwardDropout
from attemper.methods.graying import TokenGraying
from attemper.methods.hardmask import HardMask
from attemper.methods.layerdrop import LayerDrop
from attemper.methods.rates import Scheduled
from attemper.methods.registry import list_methods
from attemper.methods.skipless import Skipless

__all__ = [
    "AroraDropout", "Blur", "Consistency", "ContextBroadcast", "DropAttention", "DropConnect", "DropHead", "DropKey",
    "DropPath", "ExplicitDropout", "FeedForwardDropout", "HardMask", "LayerDrop", "Method", "Place", "RDrop",
    "Scheduled", "Skipless", "TokenGraying", "list_methods",
]  # fmt: skip
