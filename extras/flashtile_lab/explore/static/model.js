"use strict";
/* The formulas of flashtile_lab.analysis, in its conventions; a test compares them with Python over a grid.
   A shape is {n, m, d, problems, bytes, causal}: queries, keys, head_dim, batch * heads, bytes of an element. */

explore.model = (() => {
  const STATE_BYTES = 4;
  const { devices, dtypeBytes } = explore.data;
  const qBytes = (s) => s.problems * s.n * s.d * s.bytes;
  const kBytes = (s) => s.problems * s.m * s.d * s.bytes;
  const scoresBytes = (s) => s.problems * s.n * s.m * s.bytes;

  const keptScores = (s) => {
    if (!s.causal) return s.problems * s.n * s.m;
    const rows = Math.min(s.n, s.m);
    return (s.problems * (rows * (2 * s.m - rows + 1))) / 2;
  };

  // Blocks of Q and of K, the tiles with a kept score, and in how many of them the last block of K takes part.
  const visits = (s, blockQ, blockK) => {
    const numQ = Math.ceil(s.n / blockQ),
      numK = Math.ceil(s.m / blockK);
    if (!s.causal) return { numQ, numK, tiles: numQ * numK, lastK: numQ };
    let tiles = 0,
      lastK = 0;
    for (let i = 0; i < numQ; i += 1) {
      const stop = Math.min(s.m, Math.min(s.n, (i + 1) * blockQ) + s.m - s.n);
      const seen = Math.max(0, Math.ceil(stop / blockK));
      tiles += seen;
      if (seen === numK) lastK += 1;
    }
    return { numQ, numK, tiles, lastK };
  };

  const attentionFlops = (s) => {
    const scores = keptScores(s);
    return { forward: 4 * scores * s.d, backward: 10 * scores * s.d, exps: scores };
  };

  const standardTraffic = (s) => {
    const inputs = qBytes(s) + 2 * kBytes(s),
      scores = 4 * scoresBytes(s),
      out = qBytes(s);
    return { inputs, scores, out, own: inputs + scores + out };
  };

  const tiledTraffic = (s, blockQ, blockK, order) => {
    const { numQ, numK, tiles, lastK } = visits(s, blockQ, blockK);
    const row = s.d * s.bytes;
    if (order === "kv-outside") {
      const rows = tiles * blockQ - numK * (numQ * blockQ - s.n),
        state = row + 2 * STATE_BYTES;
      const inputs = 2 * kBytes(s) + s.problems * rows * row;
      const stateRead = s.problems * rows * state,
        write = s.problems * (rows + s.n) * state;
      return { inputs, stateRead, write, total: inputs + stateRead + write, rescales: s.problems * tiles };
    }
    const rows = tiles * blockK - lastK * (numK * blockK - s.m);
    const inputs = qBytes(s) + 2 * s.problems * rows * row,
      write = qBytes(s) + s.problems * s.n * STATE_BYTES;
    return { inputs, stateRead: 0, write, total: inputs + write, rescales: s.problems * numQ };
  };

  const compulsoryTraffic = (s) => 2 * qBytes(s) + 2 * kBytes(s) + s.problems * s.n * STATE_BYTES;

  const tileMemory = (blockQ, blockK, d, bytes) => {
    const state = Math.max(STATE_BYTES, bytes);
    const parts = {
      q: blockQ * d * bytes,
      k: blockK * d * bytes,
      v: blockK * d * bytes,
      probs: blockQ * blockK * bytes,
      acc: blockQ * d * state,
      stats: 2 * blockQ * state,
    };
    return { ...parts, total: Object.values(parts).reduce((a, b) => a + b) };
  };

  // Of the sides that flashtile_lab.analysis tries, the tile that fits and moves the fewest bytes: tallest, widest.
  const fittingTile = (onChip, d, bytes) => {
    const sides = explore.data.tileSides.slice().reverse();
    for (const blockQ of sides)
      for (const blockK of sides) if (tileMemory(blockQ, blockK, d, bytes).total <= onChip) return { blockQ, blockK };
    return null;
  };

  const exponentialCost = (s, device) => {
    const flops = attentionFlops(s);
    return { exp: flops.exps / devices[device].exp_per_s, product: flops.forward / devices[device].peak_flops_per_s };
  };

  const roofline = (flops, bytes, device) => {
    const { peak_flops_per_s: peak, hbm_bytes_per_s: bandwidth } = devices[device];
    const intensity = flops / bytes;
    return {
      intensity,
      attainable: Math.min(peak, intensity * bandwidth),
      time: Math.max(flops / peak, bytes / bandwidth),
      bound: intensity >= peak / bandwidth ? "compute" : "memory",
    };
  };

  const attentionMemory = (s, blockQ, blockK) => {
    const tiles = ((blockQ + 2 * blockK) * s.d + blockQ * blockK) * s.bytes;
    return { standard: scoresBytes(s), out: qBytes(s), lse: s.problems * s.n * STATE_BYTES, tiles };
  };

  // The keys [start, stop) of row i of a square call, for the masks of the second figure.
  const rowKeys = (mask, i, n) => {
    if (mask.kind === "full") return [0, n];
    if (mask.kind === "causal") return [0, i + 1];
    if (mask.kind === "window") return [Math.max(0, i - mask.left), i + 1];
    if (mask.kind === "prefix") return [0, Math.max(i + 1, Math.min(n, mask.prefix))];
    // Causal documents of equal length; the last one takes the rest.
    const size = Math.max(1, Math.floor(n / mask.documents));
    const document = Math.min(mask.documents - 1, Math.floor(i / size));
    return [document * size, i + 1];
  };

  // Kept pairs, and tiles that are whole, cut by the mask's edge, or skipped. Both ends grow with the row in all masks.
  const maskCounts = (mask, n, block) => {
    const num = Math.ceil(n / block);
    let kept = 0,
      full = 0,
      cut = 0;
    for (let i = 0; i < n; i += 1) {
      const [start, stop] = rowKeys(mask, i, n);
      kept += stop - start;
    }
    for (let b = 0; b < num; b += 1) {
      const first = rowKeys(mask, b * block, n),
        last = rowKeys(mask, Math.min(n, (b + 1) * block) - 1, n);
      const any = Math.ceil(last[1] / block) - Math.floor(first[0] / block);
      const allFrom = Math.ceil(last[0] / block),
        allTo = first[1] >= n ? num : Math.floor(first[1] / block);
      full += Math.max(0, allTo - allFrom);
      cut += any - Math.max(0, allTo - allFrom);
    }
    return { kept, full, cut, skipped: num * num - full - cut, tiles: num * num };
  };

  // How flashtile cuts the keys of a decode step of one query: backends/gpu/decode/work.py, cut.
  const cutOf = ({ keys, headsKv, group }) => {
    const rule = explore.data.decode;
    const tiles = Math.ceil(group / rule.block_m);
    const wanted = Math.max(1, Math.floor(rule.programs / (tiles * headsKv)));
    const most = Math.min(
      Math.max(1, Math.floor(rule.most_slots / (group * headsKv))),
      Math.min(Math.max(rule.most_splits, wanted), 2 * rule.most_splits),
    );
    const longest = Math.min(Math.max(Math.ceil(keys / wanted), rule.fewest_keys), rule.most_keys);
    const chunk = Math.ceil(Math.max(longest, Math.ceil(keys / most)) / rule.block_n) * rule.block_n;
    return { splits: Math.max(1, Math.ceil(keys / chunk)), chunk };
  };

  /* A decode step of one query and one sequence: call is {keys, headsKv, group, d, bytes}, in the conventions of
     flashtile_lab.analysis.decode. A program takes one key head; a multiprocessor reads at its share of the memory's
     rate. */
  const decode = (call, splits, device) => {
    const { num_sms: sms, hbm_bytes_per_s: bandwidth } = devices[device];
    const { block_m: blockQ, block_n: blockK } = explore.data.decode;
    const programs = call.headsKv * Math.ceil(call.group / blockQ);
    const headsQ = call.headsKv * call.group,
      keyBytes = 2 * call.d * call.bytes,
      keyBlocks = Math.ceil(call.keys / blockK);
    const time = (count) => {
      const keys = Math.min(call.keys, Math.ceil(keyBlocks / count) * blockK);
      const partial = count > 1 ? 2 * count * headsQ * (call.d + 1) * STATE_BYTES : 0;
      return (Math.ceil((programs * count) / sms) * keys * keyBytes * sms + partial) / bandwidth;
    };
    const counts = Array.from({ length: Math.min(keyBlocks, sms) }, (_, i) => i + 1);
    const enough = 1.05 * Math.min(...counts.map(time));
    const read = call.headsKv * call.keys * keyBytes;
    const moved = read + headsQ * (2 * call.d * call.bytes + STATE_BYTES);
    return {
      sms,
      programs: programs * splits,
      busy: Math.min(1, (programs * splits) / sms),
      filling: Math.ceil(sms / programs),
      best: counts.find((count) => time(count) <= enough),
      unsplit: time(1),
      time: time(splits),
      curve: counts.map((count) => [count, time(count)]),
      read,
      least: roofline(4 * call.d * headsQ * call.keys, moved, device).time,
    };
  };

  return {
    devices,
    dtypeBytes,
    qBytes,
    kBytes,
    scoresBytes,
    keptScores,
    visits,
    attentionFlops,
    standardTraffic,
    tiledTraffic,
    compulsoryTraffic,
    tileMemory,
    fittingTile,
    exponentialCost,
    roofline,
    attentionMemory,
    rowKeys,
    maskCounts,
    decode,
    cutOf,
  };
})();
