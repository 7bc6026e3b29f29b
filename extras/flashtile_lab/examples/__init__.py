"""Readable models built on flashtile, and the text they are trained on."""
