"""Names that apex had and ampatch does not: what they were, and what to use today. A line a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """A module, class or function of apex by its whole name; it speaks for what is below it, too."""

    name: str
    was: str
    instead: str

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, which ampatch does not provide: use {self.instead}"


ADAM, LAMB = "apex.optimizers.FusedAdam", "apex.optimizers.FusedLAMB"
DIST = "apex.parallel.distributed"
FLATTEN = f"{DIST}.flatten"
SYNC_BATCHNORM = "apex.parallel.SyncBatchNorm"
SDPA = "torch.nn.functional.scaled_dot_product_attention"
SHARDED = "torch.distributed.fsdp.fully_shard or torch.distributed.optim.ZeroRedundancyOptimizer"
SOFTMAX = "torch.softmax after adding the mask, and torch.compile to fuse the two"
CHANNELS_LAST = "in torch.channels_last memory format"

MODULES = (
    Missing("apex.RNN", "LSTM, GRU and mLSTM in Python", "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN"),
    Missing("apex._autocast_utils", "casting arguments under autocast", "torch.amp.custom_fwd"),
    Missing("apex.fused_dense", "linear layers with bias and GELU", "torch.nn.Linear, torch.nn.GELU"),
    Missing("apex.mlp", "MLP, a stack of fused linear layers", "torch.nn.Sequential of torch.nn.Linear"),
    Missing("apex.pyprof", "a profiler", "torch.profiler, or torch.autograd.profiler.emit_nvtx for Nsight"),
    Missing("apex.reparameterization", "weight norm", "torch.nn.utils.parametrizations.weight_norm"),
    Missing("apex.testing", "helpers of apex's own tests", "torch.testing"),
    Missing("apex.transformer", "Megatron's parts", "Megatron Core, or torch.distributed.tensor.parallel"),
)
# What published scripts had no reason to use, but some did.
INSIDE = (
    Missing("apex.RankInfoFormatter", "apex's own logging", "logging.Formatter"),
    Missing("apex.deprecated_warning", "apex's own logging", "warnings.warn"),
    Missing("apex.amp.compat", "helpers for torch 0.3", "torch.is_tensor and torch.is_floating_point"),
    Missing("apex.amp.rnn_compat", "patches of recurrent layers", "torch.nn.LSTM, which is cast as it is"),
    Missing("apex.amp.utils", "helpers of the casts", "torch.Tensor.to"),
    Missing("apex.amp.wrap", "the casts of functions", "apex.amp.half_function and apex.amp.float_function"),
    Missing("apex.parallel.optimized_sync_batchnorm_kernel", "the kernels of SyncBatchNorm", SYNC_BATCHNORM),
    Missing("apex.parallel.sync_batchnorm_kernel", "the kernels of SyncBatchNorm", SYNC_BATCHNORM),
    Missing("apex.parallel.distributed.extract_tensors", "a part of flat_dist_call", FLATTEN),
    Missing("apex.parallel.distributed.import_flatten_impl", "the choice of a way to flatten", FLATTEN),
    Missing("apex.parallel.distributed.split_half_float_double", "a sort by dtype", f"{DIST}.split_by_type"),
    Missing("amp_C.multi_tensor_adam_capturable", "Adam for CUDA graphs", f"{ADAM}(capturable=True)"),
    Missing("amp_C.multi_tensor_adam_capturable_master", "Adam for CUDA graphs", f"{ADAM}(capturable=True)"),
    *(
        Missing(f"amp_C.multi_tensor_{name}", "a step of an optimizer", f"apex.optimizers.Fused{kind}")
        for name, kind in (("adagrad", "Adagrad"), ("lamb", "LAMB"), ("novograd", "NovoGrad"), ("sgd", "SGD"))
    ),
    Missing("amp_C.multi_tensor_l2norm_scale", "scaling and a norm", "amp_C.multi_tensor_scale, then l2norm"),
    Missing("amp_C.multi_tensor_lamb_mp", "LAMB with half parameters", f"{LAMB} at O2"),
    Missing("amp_C.multi_tensor_lamb_stage1_cuda", "the first half of LAMB", LAMB),
    Missing("amp_C.multi_tensor_lamb_stage2_cuda", "the second half of LAMB", LAMB),
    Missing("amp_C.multi_tensor_lars", "LARS", "apex.parallel.LARC"),
    Missing("amp_C.multi_tensor_unscale_l2norm", "a norm divided by a scale", "amp_C.multi_tensor_l2norm"),
    Missing("amp_C.update_scale_hysteresis", "a loss scale", "ampatch.DynamicLossScale(hysteresis=2)"),
    Missing("apex.optimizers.FusedMixedPrecisionLamb", "LAMB with half parameters", f"{LAMB} at O2"),
    Missing("apex.optimizers.fused_mixed_precision_lamb", "LAMB with half parameters", f"{LAMB} at O2"),
)
CONTRIB = (
    Missing("apex.contrib.bottleneck", "ResNet blocks on cuDNN", f"torchvision's, {CHANNELS_LAST}"),
    Missing("apex.contrib.clip_grad", "clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
    Missing("apex.contrib.conv_bias_relu", "a convolution with ReLU", "torch.nn.Conv2d and torch.compile"),
    Missing("apex.contrib.cudnn_gbn", "BatchNorm over a group of GPUs", "torch.nn.SyncBatchNorm"),
    Missing("apex.contrib.fmha", "fused attention", SDPA),
    Missing("apex.contrib.focal_loss", "FocalLoss", "torchvision.ops.sigmoid_focal_loss"),
    Missing("apex.contrib.gpu_direct_storage", "reading files to the GPU", "torch.cuda.gds"),
    Missing("apex.contrib.group_norm", "GroupNorm for NHWC", f"torch.nn.GroupNorm {CHANNELS_LAST}"),
    Missing("apex.contrib.groupbn", "BatchNorm2d_NHWC", f"torch.nn.BatchNorm2d {CHANNELS_LAST}"),
    Missing("apex.contrib.index_mul_2d", "a fused look-up and product", "`in1[index] * in2`"),
    Missing("apex.contrib.layer_norm", "FastLayerNorm", "torch.nn.LayerNorm or apex.normalization"),
    Missing("apex.contrib.multihead_attn", "attention layers", f"torch.nn.MultiheadAttention or {SDPA}"),
    Missing("apex.contrib.nccl_allocator", "memory that NCCL registers", "torch.cuda.MemPool"),
    Missing("apex.contrib.openfold_triton", "kernels for OpenFold", f"torch.nn.LayerNorm and {SDPA}"),
    Missing("apex.contrib.optimizers.DistributedFusedAdam", "sharded Adam", SHARDED),
    Missing("apex.contrib.optimizers.DistributedFusedLAMB", "sharded LAMB", SHARDED),
    Missing("apex.contrib.optimizers.distributed_fused_adam", "sharded Adam", SHARDED),
    Missing("apex.contrib.optimizers.distributed_fused_lamb", "sharded LAMB", SHARDED),
    Missing("apex.contrib.optimizers.fp16_optimizer", "master weights", "apex.fp16_utils.FP16_Optimizer"),
    Missing("apex.contrib.optimizers.fused_adam", "the first FusedAdam", ADAM),
    Missing("apex.contrib.optimizers.fused_lamb", "the first FusedLAMB", LAMB),
    Missing("apex.contrib.optimizers.fused_sgd", "the first FusedSGD", "apex.optimizers.FusedSGD"),
    Missing("apex.contrib.peer_memory", "halo exchange between GPUs", "torch.distributed.batch_isend_irecv"),
    Missing("apex.contrib.sparsity", "ASP, 2:4 sparsity", "torch.sparse.to_sparse_semi_structured"),
    Missing("apex.contrib.torchsched", "a scheduler for compiled graphs", "torch.compile"),
    Missing("apex.contrib.transducer", "the RNN-T joint and loss", "torchaudio.functional.rnnt_loss"),
    Missing("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss", "torch.nn.functional.cross_entropy"),
)
TRANSFORMER = (
    Missing("apex.transformer.amp", "a GradScaler for ranks", "torch.distributed.fsdp.sharded_grad_scaler"),
    Missing("apex.transformer.functional", "fused softmax and rotary embedding", SOFTMAX),
    Missing("apex.transformer.layers", "LayerNorm for Megatron", "torch.nn.LayerNorm or apex.normalization"),
    Missing("apex.transformer.parallel_state", "process groups", "torch.distributed.device_mesh"),
    Missing("apex.transformer.pipeline_parallel", "pipeline schedules", "torch.distributed.pipelining"),
    Missing("apex.transformer.tensor_parallel", "split layers", "torch.distributed.tensor.parallel"),
)
# Compiled modules, which scripts import beside apex.
EXTENSIONS = (
    Missing("_apex_gpu_direct_storage", "reading files to the GPU", "torch.cuda.gds"),
    Missing("_apex_nccl_allocator", "memory that NCCL registers", "torch.cuda.MemPool"),
    Missing("bnp", "BatchNorm for NHWC over a group of GPUs", "torch.nn.SyncBatchNorm"),
    Missing("cudnn_gbn_lib", "BatchNorm over a group of GPUs", "torch.nn.SyncBatchNorm"),
    Missing("distributed_adam_cuda", "the kernels of DistributedFusedAdam", SHARDED),
    Missing("distributed_lamb_cuda", "the kernels of DistributedFusedLAMB", SHARDED),
    Missing("fast_bottleneck", "ResNet blocks on cuDNN", f"torchvision's, {CHANNELS_LAST}"),
    Missing("fast_layer_norm", "the kernels of FastLayerNorm", "torch.nn.functional.layer_norm"),
    Missing("fast_multihead_attn", "the kernels of SelfMultiheadAttn", SDPA),
    Missing("fmhalib", "the kernels of FMHA", SDPA),
    Missing("focal_loss_cuda", "the kernels of FocalLoss", "torchvision.ops.sigmoid_focal_loss"),
    Missing("fused_adam_cuda", "the kernels of the first FusedAdam", ADAM),
    Missing("fused_conv_bias_relu", "a convolution with ReLU", "torch.nn.Conv2d and torch.compile"),
    Missing("fused_dense_cuda", "the kernels of FusedDense", "torch.nn.functional.linear"),
    Missing("fused_index_mul_2d", "a fused look-up and product", "`in1[index] * in2`"),
    Missing("fused_lamb_cuda", "the kernels of the first FusedLAMB", LAMB),
    Missing("fused_layer_norm_cuda", "the kernels of FusedLayerNorm", "torch.nn.functional.layer_norm"),
    Missing("fused_rotary_positional_embedding", "rotary embedding", "plain tensor code and torch.compile"),
    Missing("fused_weight_gradient_mlp_cuda", "adding weight gradients in float32", "torch.addmm"),
    Missing("generic_scaled_masked_softmax_cuda", "a fused mask and softmax", SOFTMAX),
    Missing("group_norm_cuda", "the kernels of GroupNorm for NHWC", f"torch.nn.GroupNorm {CHANNELS_LAST}"),
    Missing("group_norm_v2_cuda", "the kernels of GroupNorm for NHWC", f"torch.nn.GroupNorm {CHANNELS_LAST}"),
    Missing("mlp_cuda", "the kernels of apex.mlp.MLP", "torch.nn.functional.linear"),
    Missing("nccl_p2p_cuda", "halo exchange between GPUs", "torch.distributed.batch_isend_irecv"),
    Missing("peer_memory_cuda", "halo exchange between GPUs", "torch.distributed.batch_isend_irecv"),
    Missing("permutation_search_cuda", "the search of ASP", "torch.sparse.to_sparse_semi_structured"),
    Missing("scaled_masked_softmax_cuda", "a fused mask and softmax", SOFTMAX),
    Missing("scaled_softmax_cuda", "a fused scale and softmax", SOFTMAX),
    Missing("scaled_upper_triang_masked_softmax_cuda", "a fused causal softmax", f"{SDPA}(is_causal=True)"),
    Missing("syncbn", "the kernels of SyncBatchNorm", "apex.parallel.SyncBatchNorm"),
    Missing("transducer_joint_cuda", "the kernels of TransducerJoint", "torchaudio.functional.rnnt_loss"),
    Missing("transducer_loss_cuda", "the kernels of TransducerLoss", "torchaudio.functional.rnnt_loss"),
    Missing("xentropy_cuda", "the kernels of SoftmaxCrossEntropyLoss", "torch.nn.functional.cross_entropy"),
)

MISSING = (*MODULES, *INSIDE, *CONTRIB, *TRANSFORMER, *EXTENSIONS)
EXTENSION_NAMES = tuple(row.name for row in EXTENSIONS)


def explain(name: str) -> str | None:
    """Says what a name was and what to use instead; None for one that apex did not have.

    >>> explain("fmhalib")
    'fmhalib was the kernels of FMHA, which ampatch does not provide: use torch.nn.functional...'
    """
    rows = [row for row in MISSING if f"{name}.".startswith(f"{row.name}.")]
    return str(max(rows, key=lambda row: len(row.name))) if rows else None
