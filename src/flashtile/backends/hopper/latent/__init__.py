"""Attention over a cache of latent rows on Hopper (MLA): keys whose first 512 columns are the values, one key head."""
