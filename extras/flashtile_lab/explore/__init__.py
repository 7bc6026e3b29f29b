"""The explorer: one self-contained HTML page on which attention is computed, stepped through and measured.

``static`` has the page, its style and its scripts, one for each figure; ``static/data`` what is recorded or measured
beforehand (``tools/explorer_data.py``); ``static/vendor`` D3 with its licence. What the library itself says, its source
lines, devices, capabilities and tiles, is read when the page is made.
"""

from flashtile_lab.explore.document import page, write

__all__ = ["page", "write"]
