"""The device vocabulary: ``@triton.jit`` helpers that every GPU kernel shares, Triton and Gluon alike.

Helpers create no tensors (layouts follow from the arguments, as Gluon requires). Index tensors are passed in already
broadcastable, so a helper works with rows or keys along the first dimension. Scores carry base-2 exponents inside the
kernels: ``x_log2`` means ``x * LOG2_E``. Importing this package imports no Triton; its modules do.
"""
