"""8-bit attention: ``flashtile.quantize``, its record ``flashtile.Quantized``, and the calls that take it."""
