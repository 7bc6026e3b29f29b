"""Kernels built with no GPU: the record of a build, each backend's list of them, and the report on their code."""
