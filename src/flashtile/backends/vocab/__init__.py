"""The device vocabulary: ``@triton.jit`` helpers that every GPU kernel shares, Triton and Gluon alike.

Helpers make no tensor of their own (a layout follows from the arguments, as Gluon needs): index tensors come in already
broadcastable, so a helper serves scores with rows or with keys along the first dimension. Scores carry base-2
exponents inside the kernels: ``x_log2`` means ``x * LOG2_E``. Importing this package imports no Triton; its modules do.
"""
