"""8-bit attention: ``flashtile.quantize``, the record that it makes, ``flashtile.Quantized``, and calls that take it."""
