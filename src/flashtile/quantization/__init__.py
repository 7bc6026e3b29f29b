"""8-bit attention: ``flashtile.quantize`` and the record that it makes, ``flashtile.Quantized``."""
