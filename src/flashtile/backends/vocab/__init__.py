"""The device vocabulary: ``@triton.jit`` helpers that every GPU kernel shares, Triton and Gluon alike."""
