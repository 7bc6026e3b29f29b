"""Beside flashtile: models of cost, published figures, a demo, examples, a page, and kernels built with no GPU.

``flashtile-lab --help`` lists the commands.
"""
