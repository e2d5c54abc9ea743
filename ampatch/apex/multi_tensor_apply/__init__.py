"""What `apex.multi_tensor_apply` resolves to for scripts that were written for apex."""

from ampatch.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

# The chunk size that apex had; nothing here is cut into chunks.
multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
