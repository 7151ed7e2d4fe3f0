"""Triton kernels for CUDA. Imported only by `attention.triton_backend`; they know tensors, not engines.

No autotuning: each kernel's shape comes from a static table, so that start-up is short and every run computes alike.
Without a GPU they run under TRITON_INTERPRET=1 (set before triton is imported) in float32 and float16; the
interpreter computes bfloat16 wrongly.
"""
