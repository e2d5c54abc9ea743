"""The lists of functions that apex.amp cast by; what scripts edit before `initialize` takes effect."""

from ampatch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
