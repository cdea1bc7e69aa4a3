"""The methods, one file each."""

from attemper.methods.base import Method, Place, Scheduled
from attemper.methods.dropattention import DropAttention
from attemper.methods.dropkey import DropKey
from attemper.methods.registry import list_methods

__all__ = ["DropAttention", "DropKey", "Method", "Place", "Scheduled", "list_methods"]
