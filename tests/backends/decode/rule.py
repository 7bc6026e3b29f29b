"""``work.cut``, which runs on the device, once more in plain Python."""

from __future__ import annotations

from flashtile.backends.gpu.decode.config import SplitRule


def cut(rule: SplitRule, keys: int, rows: int, num_tiles: int, num_heads_kv: int, block_n: int) -> tuple[int, int]:
    """Splits of a tile and keys of each."""
    wanted = max(rule.programs // max(num_tiles * num_heads_kv, 1), 1)
    most, fewest = rule.most(keys, rows, num_heads_kv, wanted), rule.fewest_keys
    if keys > 16 * fewest:
        fewest = max(fewest, min(keys // 8, rule.fewest_of_long))
    count = max(1, min(max(wanted, -(-keys // rule.most_keys)), most, -(-keys // fewest)))
    chunk = max(-(-keys // (count * block_n)), 1) * block_n
    return max(-(-keys // chunk), 1), chunk
