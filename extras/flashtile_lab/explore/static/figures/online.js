"use strict";
/* Figure 5: the online softmax on the reader's own scores: streamed, merged, in a ring, in splits. */
{
  const { attention, digits, model } = explore;
  const DEVICES = 4,
    MOST_SPLITS = 64;
  const ROUND = { float64: (x) => x, float32: Math.fround };
  const DIGITS = { float64: 15, float32: 8 };

  const parse = (text) => {
    const found = text
      .split(/[\s,;]+/)
      .filter(Boolean)
      .map(Number)
      .filter(Number.isFinite)
      .slice(0, 64);
    return found.length ? found : [0];
  };
  // Values of one column, so that the output is one number: 1, 2, 3 and so on.
  const valuesOf = (scores) => scores.map((_, j) => [j + 1]);
  const over = (scores, values, from, to, round) =>
    from >= to
      ? attention.empty(1)
      : attention.update(attention.empty(1), scores.slice(from, to), values.slice(from, to), round);
  const rowOf = (name, s, places) => [name, digits(s.max, places), digits(s.sum, places), digits(s.acc[0], places)];

  const ending = (plot, state, merged, scores, values, round, places) => {
    const exact = attention.whole(scores, values, round),
      double = attention.whole(scores, values);
    const gap = Math.abs(merged.out[0] - exact.out[0]);
    explore.table(
      plot,
      `In ${state.dtype}`,
      ["", "lse", "output"],
      [
        ["by blocks", digits(merged.lse, places), digits(merged.out[0], places)],
        ["whole row at once", digits(exact.lse, places), digits(exact.out[0], places)],
        ["difference", digits(Math.abs(merged.lse - exact.lse), 2), digits(gap, 2)],
        [
          "blocks, from float64",
          digits(Math.abs(merged.lse - double.lse), 2),
          digits(Math.abs(merged.out[0] - double.out[0]), 2),
        ],
      ],
    );
    return { scores, merged, whole: exact, gap };
  };

  const stream = (plot, state, scores, values, round, places) => {
    const steps = Math.ceil(scores.length / state.block),
      rows = [["start", "", "-inf", "", "0", "0"]];
    let now = attention.empty(1);
    for (let b = 0; b < Math.min(steps, state.step); b += 1) {
      const from = b * state.block,
        part = scores.slice(from, from + state.block),
        old = now.max;
      now = attention.update(now, part, values.slice(from, from + state.block), round);
      rows.push([
        `block ${b + 1}`,
        part.join(" "),
        now.max > old && old !== -Infinity ? `${digits(now.max, 5)}, new` : digits(now.max, 5),
        digits(now.factor, 6),
        digits(now.sum, places),
        digits(now.acc[0], places),
      ]);
    }
    explore.table(
      plot,
      "The running state",
      ["", "scores", "m", "factor of old l and O", "l", "O, not yet divided"],
      rows,
      rows.length - 1,
    );
    const seen = Math.min(scores.length, state.step * state.block);
    if (!seen) {
      explore.note(plot, "Step to read the first block.");
      return { scores, seen };
    }
    explore.note(plot, seen < scores.length ? `Of the ${seen} scores read so far:` : "All scores are read:");
    return { seen, ...ending(plot, state, attention.finish(now, round), scores.slice(0, seen), values, round, places) };
  };

  const halves = (plot, state, scores, values, round, places) => {
    const cut = Math.min(state.cut, scores.length);
    const a = over(scores, values, 0, cut, round),
      b = over(scores, values, cut, scores.length, round);
    const merged = attention.merge(a, b, round);
    explore.table(
      plot,
      `Two states over scores ${scores.slice(0, cut).join(" ") || "(none)"} and ` +
        `${scores.slice(cut).join(" ") || "(none)"}`,
      ["", "m", "l", "O"],
      [rowOf("first", a, places), rowOf("second", b, places), rowOf("merged", merged, places)],
    );
    return { a, b, ...ending(plot, state, attention.finish(merged, round), scores, values, round, places) };
  };

  // Device r starts with block r of the keys and gets the one before it in each step; its own query row differs.
  const ring = (plot, state, scores, values, round, places) => {
    const size = Math.ceil(scores.length / DEVICES),
      rows = [],
      ends = [];
    for (let r = 0; r < DEVICES; r += 1) {
      const mine = scores.map((s) => round(s * (1 - r / 4))),
        order = [];
      let now = attention.empty(1);
      for (let t = 0; t < Math.min(DEVICES, state.step); t += 1) {
        const block = (r - t + DEVICES) % DEVICES;
        order.push(block);
        now = attention.merge(
          now,
          over(mine, values, block * size, Math.min(scores.length, (block + 1) * size), round),
          round,
        );
      }
      const done = order.length === DEVICES,
        end = attention.finish(now, round),
        exact = attention.whole(mine, values, round);
      ends.push({ order, out: end.out[0], whole: exact.out[0] });
      rows.push([
        `device ${r}`,
        `${(1 - r / 4).toFixed(2)} x scores`,
        order.join(", "),
        digits(now.max, 5),
        digits(now.sum, places),
        now.sum ? digits(end.out[0], places) : "",
        done ? digits(exact.out[0], places) : "",
      ]);
    }
    explore.table(
      plot,
      `A ring of ${DEVICES}: each device keeps its query row, and blocks of K and V pass around`,
      ["", "its row", "blocks merged, in order", "m", "l", "output so far", "whole row"],
      rows,
    );
    explore.note(
      plot,
      "Every device merges the blocks in another order, and all agree with the whole row: merging is " +
        "associative. A step of the ring passes one block " +
        "of K and V on, 2 (n / P) d elements of each head.",
    );
    return { ends };
  };

  // The time of a decode step by the number of splits.
  const drawSplits = (plot, d, splits) => {
    const size = { ...explore.svg(plot, 200, "Time of a decode step by splits"), left: 62, right: 12 };
    const shown = d.curve.filter(([count]) => count <= MOST_SPLITS);
    const x = d3.scaleLog([1, MOST_SPLITS], [size.left, size.width - 14]).base(2),
      y = d3.scaleLinear([0, d3.max(shown, (p) => p[1]) * 1.1], [166, 8]);
    const ticks = [1, 2, 4, 8, 16, 32, 64].filter((count) => count <= MOST_SPLITS);
    explore.axes(size.svg, x, y, size, ["splits", "time"], [String, explore.seconds], { x: ticks });
    size.svg
      .append("path")
      .attr("fill", "none")
      .attr("stroke", "var(--tiled)")
      .attr("stroke-width", 2)
      .attr(
        "d",
        d3.line(
          (p) => x(p[0]),
          (p) => y(p[1]),
        )(shown),
      );
    size.svg
      .append("circle")
      .attr("r", 5)
      .attr("fill", "var(--standard)")
      .attr("cx", x(splits))
      .attr("cy", y(Math.min(y.domain()[1], d.time)));
  };

  const splits = (plot, state, scores, values, round, places) => {
    const count = Math.min(state.splits, scores.length),
      parts = [];
    for (let s = 0; s < count; s += 1) {
      const [from, to] = [s, s + 1].map((x) => Math.floor((x * scores.length) / count));
      parts.push(over(scores, values, from, to, round));
    }
    const merged = parts.reduce((a, b) => attention.merge(a, b, round));
    explore.table(
      plot,
      "One query row, its keys split",
      ["", "m", "l", "O"],
      [...parts.map((p, s) => rowOf(`split ${s + 1}`, p, places)), rowOf("merged", merged, places)],
    );
    const numbers = ending(plot, state, attention.finish(merged, round), scores, values, round, places);
    const call = { keys: 2 ** state.log, headsKv: state.headsKv, group: state.group, d: 128, bytes: 2 };
    const rule = model.cutOf(call),
      d = model.decode(call, state.splits, state.device);
    drawSplits(plot, d, state.splits);
    explore.table(
      plot,
      `A decode step: one query, ${explore.length(call.keys)} keys, head_dim 128, 16 bits, on a ${state.device}`,
      ["", ""],
      [
        ["programs", String(d.programs)],
        ["multiprocessors with work", `${Math.min(d.sms, d.programs)} of ${d.sms}`],
        ["splits that give all of them work", String(d.filling)],
        ["fewest splits within 5% of the shortest time", String(d.best)],
        ["flashtile's rule cuts the keys into", `${rule.splits} splits of ${explore.integer(rule.chunk)}`],
        ["K and V to read", explore.bytes(d.read)],
        ["least time at full bandwidth", explore.seconds(d.least)],
        ["time without splits", explore.seconds(d.unsplit)],
        [`time with ${state.splits}`, explore.seconds(d.time)],
      ],
    );
    explore.note(
      plot,
      "Times by flashtile_lab.analysis.decode: a multiprocessor reads at its share of the memory's rate, so " +
        "a call takes as long as the one with the most keys.",
    );
    return { ...numbers, decode: d, rule, parts: parts.length };
  };

  const VIEWS = { stream, halves, ring, splits };
  explore.figure({
    name: "online",
    title: "Online softmax, on your scores",
    see:
      "When a larger score arrives, everything so far is multiplied by one factor, and the result is that of " +
      "the whole row at once; the same " +
      "rule merges two halves, the blocks of a ring, and the splits of a decode step.",
    controls: [
      {
        name: "view",
        label: "view",
        choices: [
          ["stream", "one row, streamed"],
          ["halves", "two halves, merged"],
          ["ring", "four devices in a ring"],
          ["splits", "splits of a decode step"],
        ],
        value: "stream",
      },
      { name: "text", label: "your scores", text: true, value: "1 3 2 5 4 3.5 -2 6.25" },
      { name: "dtype", label: "arithmetic", choices: ["float64", "float32"], value: "float64" },
      { name: "block", label: "scores a block", range: [1, 8], value: 2, when: (s) => s.view === "stream" },
      {
        name: "step",
        label: "step",
        stepper: true,
        range: (s) => [0, s.view === "ring" ? DEVICES : Math.ceil(parse(s.text).length / s.block)],
        value: 2,
        show: (v) => String(v),
        when: (s) => s.view === "stream" || s.view === "ring",
      },
      {
        name: "cut",
        label: "first half ends after",
        range: (s) => [0, parse(s.text).length],
        value: 3,
        when: (s) => s.view === "halves",
      },
      { name: "splits", label: "splits", range: [1, MOST_SPLITS], value: 4, when: (s) => s.view === "splits" },
      {
        name: "group",
        label: "query heads a KV head",
        range: [1, 16],
        value: 4,
        when: (s) => s.view === "splits",
      },
      { name: "headsKv", label: "KV heads", range: [1, 64], value: 8, when: (s) => s.view === "splits" },
      {
        name: "log",
        label: "keys",
        range: [9, 20],
        value: 15,
        show: (v) => explore.length(2 ** v),
        when: (s) => s.view === "splits",
      },
      {
        name: "device",
        label: "GPU",
        choices: Object.keys(model.devices),
        value: "H200",
        when: (s) => s.view === "splits",
      },
    ],
    draw(state, plot) {
      const round = ROUND[state.dtype],
        scores = parse(state.text).map(round);
      return {
        view: state.view,
        ...VIEWS[state.view](plot, state, scores, valuesOf(scores), round, DIGITS[state.dtype]),
      };
    },
  });
}
