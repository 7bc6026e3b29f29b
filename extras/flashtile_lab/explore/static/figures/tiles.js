"use strict";
/* Figure 4: the tile loop, forward and backward, on numbers. */
{
  const { attention, digits, element } = explore;
  const D = 2;
  const shown = (row) => `(${row.map((x) => digits(x, 5)).join(", ")})`;

  const prepare = (state) => {
    const x = attention.inputs(state.n, D, 7);
    const whole = x.q.map((_, i) => attention.whole(attention.scoresOf(x, i, 0, state.n), x.v));
    const forward = attention.forwardSteps(x, state.blockQ, state.blockK, state.order);
    const backward = attention.backwardSteps(x, state.blockQ, state.blockK, whole);
    return { x, whole, forward, backward, steps: state.direction === "forward" ? forward : backward.steps };
  };
  const count = (state) => Math.ceil(state.n / state.blockQ) * Math.ceil(state.n / state.blockK);

  const drawGrid = (pane, state, made) => {
    const strip = 26,
      size = Math.min(360, Math.max(230, pane.clientWidth - 70)),
      cell = size / state.n;
    const { svg } = explore.svg(
      pane,
      size + strip + 24,
      `Tiles of the score matrix after step ${state.step}`,
      size + strip + 40,
    );
    const now = state.step > 0 ? made.steps[state.step - 1] : null,
      done = new Set();
    made.steps.slice(0, state.step).forEach((s) => done.add(`${s.i},${s.j}`));
    const isQ = (i) => now && Math.floor(i / state.blockQ) === now.i,
      isK = (j) => now && Math.floor(j / state.blockK) === now.j;
    for (let i = 0; i < state.n; i += 1) {
      svg
        .append("rect")
        .attr("x", 18)
        .attr("y", strip + 20 + i * cell)
        .attr("width", strip - 8)
        .attr("height", cell - 1)
        .attr("fill", isQ(i) ? "var(--lit)" : "var(--skip)")
        .attr("stroke", i === state.row ? "var(--text)" : "none");
      svg
        .append("rect")
        .attr("y", 18)
        .attr("x", strip + 20 + i * cell)
        .attr("height", strip - 8)
        .attr("width", cell - 1)
        .attr("fill", isK(i) ? "var(--lit)" : "var(--skip)");
      for (let j = 0; j < state.n; j += 1) {
        const lit = isQ(i) && isK(j),
          key = `${Math.floor(i / state.blockQ)},${Math.floor(j / state.blockK)}`;
        svg
          .append("rect")
          .attr("x", strip + 20 + j * cell)
          .attr("y", strip + 20 + i * cell)
          .attr("width", cell - 1)
          .attr("height", cell - 1)
          .attr("fill", lit ? "var(--lit)" : done.has(key) ? "var(--done)" : "var(--skip)");
      }
    }
    svg
      .append("rect")
      .attr("x", strip + 19)
      .attr("y", strip + 19.5 + state.row * cell)
      .attr("width", size + 1)
      .attr("height", cell)
      .attr("fill", "none")
      .attr("stroke", "var(--text)")
      .attr("stroke-width", 1.5);
    svg
      .append("text")
      .attr("x", strip + 20)
      .attr("y", 12)
      .text("K and V");
    svg
      .append("text")
      .attr("transform", `translate(4,${strip + 20}) rotate(90)`)
      .text("Q and O");
    explore.legend(pane, [
      ["in SRAM now", "var(--lit)"],
      ["done, no longer stored anywhere", "var(--done)"],
      ["to come", "var(--skip)"],
    ]);
  };

  const forwardRows = (pane, state, made) => {
    const before = { max: -Infinity, sum: 0, acc: new Array(D).fill(0), factor: 1 };
    const mine = [];
    let last = before;
    made.steps.slice(0, state.step).forEach((s, index) => {
      if (Math.floor(state.row / state.blockQ) !== s.i) return;
      last = s.states[state.row];
      mine.push([
        `${index + 1}: keys ${s.j * state.blockK} to ${Math.min(state.n, (s.j + 1) * state.blockK) - 1}`,
        digits(last.max, 6),
        digits(last.factor, 5),
        digits(last.sum, 6),
        shown(last.acc),
      ]);
    });
    const now = made.steps[state.step - 1];
    const isLit = now && now.i === Math.floor(state.row / state.blockQ);
    explore.table(
      pane,
      `Row ${state.row}: the running state`,
      ["step", "m", "factor", "l", "O, not yet divided"],
      [["start", "-inf", "", "0", shown(before.acc)], ...mine],
      isLit ? mine.length : -1,
    );
    const ends = attention.finish(last),
      exact = made.whole[state.row];
    const complete = mine.length === Math.ceil(state.n / state.blockK);
    explore.table(
      pane,
      "O / l, and the softmax of the whole row",
      ["", "lse", "O"],
      [
        [
          complete ? "tiled, all keys" : "tiled, keys so far",
          mine.length ? digits(ends.lse, 12) : "-inf",
          mine.length ? shown(ends.out) : "none yet",
        ],
        ["whole row", digits(exact.lse, 12), shown(exact.out)],
      ],
    );
    return { complete, lse: ends.lse, out: ends.out, whole: exact };
  };

  const backwardRows = (pane, state, made) => {
    const now = made.steps[state.step - 1],
      row = state.row,
      exact = made.backward;
    const tile = now && now.tile[row],
      from = now ? now.j * state.blockK : 0;
    explore.table(
      pane,
      `Row ${row}: kept lse ${digits(made.whole[row].lse, 8)}, D = dO . O = ${digits(exact.delta[row], 6)}`,
      ["key", "P = exp(S - lse)", "dS = P (dP - D)"],
      tile
        ? tile.probs.map((p, c) => [String(from + c), digits(p, 6), digits(tile.dscores[c], 6)])
        : [["this row is not in SRAM", "", ""]],
    );
    const none = new Array(D).fill(0);
    const key = Math.min(state.n - 1, from);
    explore.table(
      pane,
      "Gradients so far, and at the end",
      ["", "so far", "at the end"],
      [
        [`dQ of row ${row}`, shown(now ? now.dqRow[row] : none), shown(exact.dq[row])],
        [`dK of key ${key}`, shown(now ? now.dkRow[key] : none), shown(exact.dk[key])],
        [`dV of key ${key}`, shown(now ? now.dvRow[key] : none), shown(exact.dv[key])],
      ],
    );
    return { dq: exact.dq, dk: exact.dk, dv: exact.dv };
  };

  const inSram = (state, now) => {
    if (!now) return "Nothing is loaded yet.";
    const q = `rows ${now.i * state.blockQ} to ${Math.min(state.n, (now.i + 1) * state.blockQ) - 1}`;
    const k = `keys ${now.j * state.blockK} to ${Math.min(state.n, (now.j + 1) * state.blockK) - 1}`;
    if (state.direction === "backward")
      return (
        `In SRAM: K, V and the sums dK, dV of ${k}, which stay; Q, dO, lse and D of ${q}, which pass by. ` +
        "P comes back from lse, and a share of dQ is added to memory."
      );
    return state.order === "q-outside"
      ? `In SRAM: Q of ${q} with its m, l and O, which stay until the row of tiles ends; K and V of ${k}, ` +
          "which pass by."
      : `In SRAM: K and V of ${k}, which stay; Q of ${q} passes by, and its m, l and O come from memory and go ` +
          "back for every tile.";
  };

  explore.figure({
    name: "tiles",
    title: "The tile loop, step by step",
    see:
      "Only one tile of the matrix exists at a time, and what a row keeps from tile to tile is one maximum, " +
      "one sum and one row of O; the " +
      "backward computes each tile's P again from one kept number a row.",
    controls: [
      { name: "direction", label: "direction", choices: ["forward", "backward"], value: "forward" },
      {
        name: "order",
        label: "outer loop",
        choices: [
          ["q-outside", "Q (FA2, flashtile)"],
          ["kv-outside", "K and V (FA1)"],
        ],
        value: "q-outside",
        when: (s) => s.direction === "forward",
      },
      { name: "n", label: "tokens", range: [4, 16], value: 9 },
      { name: "blockQ", label: "rows of a tile", range: [1, 8], value: 3 },
      { name: "blockK", label: "keys of a tile", range: [1, 8], value: 3 },
      { name: "row", label: "row to watch", range: (s) => [0, s.n - 1], value: 4 },
      {
        name: "step",
        label: "step",
        stepper: true,
        range: (s) => [0, count(s)],
        value: 5,
        show: (v, s) => `${v} of ${count(s)}`,
      },
    ],
    draw(state, plot) {
      const made = prepare(state);
      const panes = plot.appendChild(element("div", { className: "panes" }));
      const [left, right] = [0, 1].map(() => panes.appendChild(element("div")));
      drawGrid(left, state, made);
      explore.note(right, inSram(state, state.step > 0 ? made.steps[state.step - 1] : null));
      const numbers =
        state.direction === "forward" ? forwardRows(right, state, made) : backwardRows(right, state, made);
      return { ...numbers, inputs: made.x, step: state.step };
    },
  });
}
