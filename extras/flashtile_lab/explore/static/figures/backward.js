"use strict";
/* Figure 6: what the forward keeps, and what the backward computes again. */
{
  const { model, bytes, seconds, length, quantity } = explore;
  explore.figure({
    name: "backward",
    title: "Backward: one number a row",
    see:
      "Keeping P costs a matrix and its way through the memory; keeping lse, one number a row, costs a fifth product " +
      "instead, which takes less time than P's way there and back.",
    controls: [
      { name: "log", label: "length", range: [9, 17], value: 13, show: (v) => length(2 ** v) },
      { name: "d", label: "head_dim", choices: [64, 128, 256], value: 128 },
      { name: "heads", label: "heads", range: [1, 64], value: 32 },
      { name: "device", label: "GPU", choices: Object.keys(model.devices), value: "H100" },
      { name: "causal", label: "causal", check: true, value: false },
    ],
    draw(state, plot) {
      const n = 2 ** state.log,
        device = model.devices[state.device];
      const s = { n, m: n, d: state.d, problems: state.heads, bytes: 2, causal: state.causal };
      const flops = model.attentionFlops(s),
        kept = model.attentionMemory(s, 128, 128),
        product = flops.forward / 2;
      const numbers = {
        forward: flops.forward,
        recomputed: flops.backward,
        stored: 4 * product,
        lse: kept.lse,
        out: kept.out,
        probs: kept.standard,
        wayTime: (2 * kept.standard) / device.hbm_bytes_per_s,
        productTime: product / device.peak_flops_per_s,
        expTime: flops.exps / device.exp_per_s,
      };
      const panes = plot.appendChild(explore.element("div", { className: "panes" }));
      const [left, right] = [0, 1].map(() => panes.appendChild(explore.element("div")));
      explore.note(left, "Kept between forward and backward, besides Q, K and V");
      explore.bars(left, "Bytes kept", [
        ["P, standard", numbers.probs, "var(--standard)", bytes(numbers.probs)],
        ["out, both", numbers.out, "var(--grey)", bytes(numbers.out)],
        ["lse, tiled", numbers.lse, "var(--tiled)", bytes(numbers.lse)],
      ]);
      explore.note(right, "Matrix products of the backward");
      explore.bars(right, "FLOPs", [
        ["forward: S, O", numbers.forward, "var(--grey)", quantity(numbers.forward, "FLOP")],
        ["with P: dP, dV, dQ, dK", numbers.stored, "var(--standard)", quantity(numbers.stored, "FLOP")],
        ["with lse: S again too", numbers.recomputed, "var(--tiled)", quantity(numbers.recomputed, "FLOP")],
      ]);
      explore.table(
        plot,
        `P again, or P from memory, on a ${state.device}`,
        ["way to P", "work", "least time"],
        [
          ["write it and read it", bytes(2 * numbers.probs), seconds(numbers.wayTime)],
          ["product S = Q K^T", quantity(product, "FLOP"), seconds(numbers.productTime)],
          ["exponential of S - lse", `${quantity(flops.exps, "exp")}`, seconds(numbers.expTime)],
        ],
      );
      explore.note(
        plot,
        "P = exp(S - lse) is normalised already. The second number a row, D = sum of dO * O, is computed when " +
          "the backward starts: " +
          "dS = P * (dP - D), with dP = dO V^T.",
      );
      return numbers;
    },
  });
}
