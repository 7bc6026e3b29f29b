"use strict";
/* Figure 2: the N x N matrix, and what masks leave of it. */
{
  const { model, bytes, integer, length } = explore;
  const MOST = 32;

  explore.figure({
    name: "matrix",
    title: "The N x N matrix",
    see:
      "Twice the length is four times the matrix, until one layer's scores no longer fit on the GPU; a mask " +
      "leaves whole tiles " +
      "without a kept score, and tiled attention skips those.",
    controls: [
      { name: "log", label: "length", range: [2, 17], value: 13, show: (v) => explore.length(2 ** v) },
      { name: "kind", label: "mask", choices: ["full", "causal", "window", "documents", "prefix"], value: "causal" },
      {
        name: "part",
        label: "window",
        range: [1, 64],
        value: 16,
        show: (v, s) => `1/${v} of the length, ${Math.max(1, Math.floor(2 ** s.log / v))} keys before`,
        when: (s) => s.kind === "window",
      },
      { name: "documents", label: "documents", range: [1, 16], value: 4, when: (s) => s.kind === "documents" },
      {
        name: "prefix",
        label: "prefix",
        range: [0, 100, 5],
        value: 40,
        show: (v) => `${v}% of the length`,
        when: (s) => s.kind === "prefix",
      },
      { name: "heads", label: "heads", range: [1, 64], value: 32 },
      {
        name: "bytes",
        label: "element",
        choices: [
          [2, "16 bits"],
          [4, "32 bits"],
        ],
        value: 2,
      },
      { name: "device", label: "GPU", choices: Object.keys(model.devices), value: "H100" },
    ],
    draw(state, plot) {
      const n = 2 ** state.log;
      const mask = {
        kind: state.kind,
        left: Math.max(1, Math.floor(n / state.part)),
        documents: Math.min(n, state.documents),
        prefix: Math.floor((n * state.prefix) / 100),
      };
      const block = Math.max(1, n / MOST),
        cells = n / block;
      const counts = model.maskCounts(mask, n, block),
        tile = model.maskCounts(mask, n, Math.min(128, n));
      const panes = plot.appendChild(explore.element("div", { className: "panes" }));
      const left = panes.appendChild(explore.element("div")),
        right = panes.appendChild(explore.element("div"));
      const size = Math.min(380, Math.max(240, left.clientWidth - 30));
      const { svg } = explore.svg(left, size + 22, `Score matrix under the mask: ${state.kind}`, size + 22);
      const cell = size / cells;
      const colour = { full: "var(--tiled)", cut: "var(--edge)", skipped: "var(--skip)" };
      for (let i = 0; i < cells; i += 1) {
        const first = model.rowKeys(mask, i * block, n),
          last = model.rowKeys(mask, (i + 1) * block - 1, n);
        for (let j = 0; j < cells; j += 1) {
          const from = j * block,
            to = from + block;
          const any = to > first[0] && from < last[1],
            all = from >= last[0] && to <= first[1];
          svg
            .append("rect")
            .attr("x", 20 + j * cell)
            .attr("y", 18 + i * cell)
            .attr("width", cell - 0.6)
            .attr("height", cell - 0.6)
            .attr("fill", colour[all ? "full" : any ? "cut" : "skipped"]);
        }
      }
      svg
        .append("text")
        .attr("x", 20)
        .attr("y", 12)
        .text(`keys 0 to ${integer(n - 1)}`);
      svg.append("text").attr("transform", "translate(13,24) rotate(90)").text("queries");
      explore.legend(left, [
        ["every pair kept", colour.full],
        ["some kept", colour.cut],
        ["none kept", colour.skipped],
      ]);
      explore.note(left, block > 1 ? `A cell is ${block} x ${block} pairs.` : "A cell is one pair.");
      const perHead = n * n * state.bytes,
        all = perHead * state.heads,
        room = model.devices[state.device].hbm_capacity_bytes;
      const fits = all <= room;
      const verdict = explore.element("span", { className: fits ? "good" : "bad" }, fits ? "fits" : "does not fit");
      explore.table(
        right,
        `Scores of one layer at ${length(n)} tokens`,
        ["", ""],
        [
          ["entries of a head", integer(n * n)],
          ["bytes of a head", bytes(perHead)],
          [`bytes of ${state.heads} heads`, bytes(all)],
          [`one such matrix in ${bytes(room)} of a ${state.device}`, verdict],
          ["longest that fits", integer(Math.floor(Math.sqrt(room / (state.heads * state.bytes))))],
          ["kept pairs of a head", integer(tile.kept)],
          ["kept share", `${((100 * tile.kept) / (n * n)).toFixed(2)}%`],
          [`tiles of ${Math.min(128, n)} x ${Math.min(128, n)}`, integer(tile.tiles)],
          ["visited, whole", integer(tile.full)],
          ["visited, cut by the mask", integer(tile.cut)],
          [
            state.kind === "prefix" ? "without a kept pair" : "skipped",
            `${integer(tile.skipped)} (${((100 * tile.skipped) / tile.tiles).toFixed(1)}%)`,
          ],
        ],
      );
      const how = {
        full: "attention(q, k, v)",
        causal: "attention(q, k, v, causal=True)",
        window: `attention(q, k, v, window_size=(${mask.left}, 0))`,
        documents: "attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)",
        prefix: "attention(q, k, v, attn_mask=mask)",
      };
      explore.note(
        right,
        state.kind === "prefix"
          ? "As a call: attention(q, k, v, attn_mask=mask). A boolean mask says nothing of ranges before it is " +
              "read, so kernels visit all of these tiles."
          : `As a call: ${how[state.kind]}`,
      );
      return { n, perHead, all, fits, ...tile, cells: counts };
    },
  });
}
