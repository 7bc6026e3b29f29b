"""flashtile's kernels, built ahead: one archive an architecture. Nothing is imported from here; flashtile finds it."""
