"""The device vocabulary: ``@triton.jit`` helpers that every GPU kernel shares, Triton and Gluon alike.

Helpers create no tensors (layouts follow from the arguments, as Gluon requires). Index tensors are passed in already
broadcastable, so a helper works with rows or keys along the first dimension. Scores carry base-2 exponents inside the
kernels: ``x_log2`` means ``x * LOG2_E``. Importing this package imports no Triton; its modules do.

Triton 3.6 sets rules for the text of kernels, Triton and Gluon alike. Places that look odd name the rule:

* assigned records: a record that holds constants is passed on or built in an argument list, never assigned, returned or
  added to: its constants would become tensors.
* last constant: a record that holds records with constants, and numbers, ends with a constant of its own: else the
  constants of those records are taken for None after a function's first branch, or in a loop.
* flags: a kernel cannot ask whether a record is None if that holds another record or None: a constant beside it says.
* results: a function does not return None; a function of Gluon returns something.
* tuples: a sum of tuples has lost the field names of the records in it. A tuple of one is taken for what is in it where
  a compiled function is looked for, so a function neither takes nor returns one that is added to another.

Names that differ between releases are in ``hopper.device.gluon_compat``.
"""
