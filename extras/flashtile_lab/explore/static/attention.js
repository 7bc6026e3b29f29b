"use strict";
/* Attention itself, on small numbers: the definition, the online softmax, the tiled loops, merging. */

explore.attention = (() => {
  const id = (x) => x;

  // Numbers from a seed, the same on every visit: a Weyl sequence through a mixing function, and normal ones by Box
  // and Muller.
  const uniforms = (seed) => {
    let a = seed >>> 0;
    const mixed = (x, shift, factor) => Math.imul(x ^ (x >>> shift), factor);
    return () => {
      a = (a + 0x9e3779b9) >>> 0;
      const x = mixed(mixed(a, 16, 0x85ebca6b), 13, 0xc2b2ae35);
      return ((x ^ (x >>> 16)) >>> 0) / 4294967296;
    };
  };
  const normals = (seed) => {
    const uniform = uniforms(seed);
    return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  };
  const matrix = (rows, cols, draw) => Array.from({ length: rows }, () => Array.from({ length: cols }, draw));
  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
    return sum;
  };
  const zeros = (rows, cols) => matrix(rows, cols, () => 0);

  // The definition, row by row: out, lse and probabilities.
  const whole = (scores, values, round = id) => {
    const top = Math.max(...scores);
    const weights = scores.map((s) => round(Math.exp(round(s - top))));
    const sum = weights.reduce((a, b) => round(a + b), 0);
    const out = values[0].map((_, c) => weights.reduce((acc, w, j) => round(acc + round(w * values[j][c])), 0));
    return { max: top, sum, out: out.map((x) => round(x / sum)), lse: round(top + round(Math.log(sum))) };
  };

  const empty = (cols) => ({ max: -Infinity, sum: 0, acc: new Array(cols).fill(0) });

  // Adds a block of scores and values to the state of a row: the update of backends/gpu/device/softmax.py, in base e.
  const update = (state, scores, values, round = id) => {
    const max = Math.max(state.max, ...scores),
      origin = max === -Infinity ? 0 : max;
    const factor = round(Math.exp(round(state.max - origin)));
    const weights = scores.map((s) => round(Math.exp(round(s - origin))));
    const sum = weights.reduce((a, w) => round(a + w), round(state.sum * factor));
    const acc = state.acc.map((x, c) =>
      weights.reduce((a, w, j) => round(a + round(w * values[j][c])), round(x * factor)),
    );
    return { max, sum, acc, factor };
  };

  const finish = (state, round = id) => ({
    max: state.max,
    sum: state.sum,
    out: state.acc.map((x) => round(x / state.sum)),
    lse: round(state.max + round(Math.log(state.sum))),
  });

  // Two states over different keys become one.
  const merge = (a, b, round = id) => {
    const max = Math.max(a.max, b.max),
      origin = max === -Infinity ? 0 : max;
    const fa = round(Math.exp(round(a.max - origin))),
      fb = round(Math.exp(round(b.max - origin)));
    return {
      max,
      sum: round(round(a.sum * fa) + round(b.sum * fb)),
      acc: a.acc.map((x, c) => round(round(x * fa) + round(b.acc[c] * fb))),
    };
  };

  // q, k, v and dout of a small call.
  const inputs = (n, d, seed = 1) => {
    const draw = normals(seed);
    return {
      q: matrix(n, d, draw),
      k: matrix(n, d, draw),
      v: matrix(n, d, draw),
      dout: matrix(n, d, draw),
      scale: d ** -0.5,
    };
  };

  const scoresOf = (x, i, from, to) => x.k.slice(from, to).map((key) => dot(x.q[i], key) * x.scale);

  /* The tiled forward: one step a tile, with the states of all rows after it. Rows do not interact, so both orders
     of the loops give each row the same steps. */
  const forwardSteps = (x, blockQ, blockK, order) => {
    const n = x.q.length,
      d = x.v[0].length,
      steps = [];
    const states = Array.from({ length: n }, () => empty(d));
    const tiles = [];
    const numQ = Math.ceil(n / blockQ),
      numK = Math.ceil(n / blockK);
    if (order === "q-outside") for (let i = 0; i < numQ; i += 1) for (let j = 0; j < numK; j += 1) tiles.push([i, j]);
    else for (let j = 0; j < numK; j += 1) for (let i = 0; i < numQ; i += 1) tiles.push([i, j]);
    for (const [i, j] of tiles) {
      const from = j * blockK,
        to = Math.min(n, from + blockK);
      for (let r = i * blockQ; r < Math.min(n, (i + 1) * blockQ); r += 1)
        states[r] = update(states[r], scoresOf(x, r, from, to), x.v.slice(from, to));
      steps.push({ i, j, states: states.slice() });
    }
    return steps;
  };

  /* The tiled backward: keys outside, as the kernels that compute dk and dv; P comes back from lse. */
  const backwardSteps = (x, blockQ, blockK, forward) => {
    const n = x.q.length,
      d = x.q[0].length,
      steps = [];
    const [dq, dk, dv] = [zeros(n, d), zeros(n, d), zeros(n, d)];
    const delta = x.dout.map((row, i) => dot(row, forward[i].out));
    for (let j = 0; j < Math.ceil(n / blockK); j += 1) {
      for (let i = 0; i < Math.ceil(n / blockQ); i += 1) {
        const tile = {};
        for (let r = i * blockQ; r < Math.min(n, (i + 1) * blockQ); r += 1) {
          const from = j * blockK,
            to = Math.min(n, from + blockK);
          const probs = scoresOf(x, r, from, to).map((s) => Math.exp(s - forward[r].lse));
          tile[r] = { probs, dscores: [] };
          for (let c = from; c < to; c += 1) {
            const p = probs[c - from],
              dscore = p * (dot(x.dout[r], x.v[c]) - delta[r]);
            tile[r].dscores.push(dscore);
            for (let e = 0; e < d; e += 1) {
              dv[c][e] += p * x.dout[r][e];
              dq[r][e] += dscore * x.k[c][e] * x.scale;
              dk[c][e] += dscore * x.q[r][e] * x.scale;
            }
          }
        }
        steps.push({
          i,
          j,
          tile,
          dqRow: dq.map((row) => row.slice()),
          dkRow: dk.map((row) => row.slice()),
          dvRow: dv.map((row) => row.slice()),
        });
      }
    }
    return { steps, delta, dq, dk, dv };
  };

  return {
    uniforms,
    normals,
    matrix,
    dot,
    whole,
    empty,
    update,
    finish,
    merge,
    inputs,
    scoresOf,
    forwardSteps,
    backwardSteps,
  };
})();
