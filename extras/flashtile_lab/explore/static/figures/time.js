"use strict";
/* Figure 1: the least time of each part of a layer's attention. */
{
  const { model, seconds, length } = explore;
  explore.figure({
    name: "time",
    title: "Where the time goes",
    see:
      "Standard attention writes the whole score matrix to memory and reads it again, and most of its time goes " +
      "there. Tiled attention does the same arithmetic without that. Its tiles read K and V many times; if the " +
      "cache answers the repeated reads, the products on the tensor cores take longest.",
    controls: [
      { name: "device", label: "GPU", choices: Object.keys(model.devices), value: "H100" },
      { name: "log", label: "length", range: [9, 17], value: 13, show: (v) => length(2 ** v) },
      { name: "d", label: "head_dim", choices: [64, 128, 256], value: 128 },
      { name: "heads", label: "heads", range: [1, 64], value: 16 },
      { name: "batch", label: "batch", range: [1, 16], value: 1 },
      { name: "blockQ", label: "rows of a tile", choices: [64, 128, 192, 256], value: 128 },
      { name: "causal", label: "causal", check: true, value: false },
    ],
    draw(state, plot) {
      const n = 2 ** state.log;
      const s = { n, m: n, d: state.d, problems: state.heads * state.batch, bytes: 2, causal: state.causal };
      const device = model.devices[state.device];
      const cost = model.exponentialCost(s, state.device);
      const bandwidth = device.hbm_bytes_per_s;
      // Standard attention computes all scores, of which a mask hides some afterwards.
      const all = model.exponentialCost({ ...s, causal: false }, state.device);
      const numbers = {
        standardProduct: all.product,
        standardExp: all.exp,
        standardMemory: model.standardTraffic(s).own / bandwidth,
        tiledProduct: cost.product,
        tiledExp: cost.exp,
        tiledMemory: model.tiledTraffic(s, state.blockQ, 128, "q-outside").total / bandwidth,
        compulsory: model.compulsoryTraffic(s) / bandwidth,
      };
      const row = (name, value, colour) => [name, value, colour, seconds(value)];
      explore.bars(plot, "Least time of products, exponentials and memory, standard and tiled", [
        row("standard: products", numbers.standardProduct, "var(--tiled)"),
        row("standard: exponentials", numbers.standardExp, "var(--third)"),
        row("standard: memory", numbers.standardMemory, "var(--standard)"),
        row("tiled: products", numbers.tiledProduct, "var(--tiled)"),
        row("tiled: exponentials", numbers.tiledExp, "var(--third)"),
        row("tiled: memory, no cache", numbers.tiledMemory, "var(--standard)"),
        row("tiled: memory, once", numbers.compulsory, "var(--standard)"),
      ]);
      const standard = Math.max(numbers.standardProduct, numbers.standardExp, numbers.standardMemory);
      const tiled = Math.max(numbers.tiledProduct, numbers.tiledExp, numbers.tiledMemory);
      explore.note(
        plot,
        `Forward of one layer's attention in 16 bits: ${state.batch} x ${state.heads} heads. Each part alone ` +
          "at its peak; with " +
          `perfect overlap the longest bar is the time: ${seconds(standard)} against ${seconds(tiled)}, ` +
          `${(standard / tiled).toFixed(1)} times. ` +
          "The last bar is what remains of the memory's time if a cache catches every repeated read of K and V.",
      );
      return numbers;
    },
  });
}
