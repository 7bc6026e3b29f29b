"""Random calls: one record from a seed (``drawn``), as tensors to compute with or as launches to build (``launches``)."""
