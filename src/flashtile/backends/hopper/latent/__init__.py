"""Attention over a cache of latent rows on Hopper (MLA): the first 512 columns of keys are the values, one key head."""
