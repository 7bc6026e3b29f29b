"use strict";
/* Figure 8: what e4m3 makes of queries and keys, by scale and rotation. */
{
  const { attention, quantise, digits, element } = explore;
  const N = 128,
    D = 64,
    BLOCK = 32,
    ROW = 5,
    LANE = 20;

  // Normal numbers, of which a share has a larger one added, and in one row an outlier that the reader drags.
  const base = (() => {
    const draw = attention.normals(11),
      uniform = attention.uniforms(12);
    const one = () => attention.matrix(N, D, () => [draw(), draw(), uniform()]);
    return { q: one(), k: one(), v: one() };
  })();
  const makeInputs = (state) => {
    const value = ([small, large, u]) => small + (u < state.share / 100 ? large * state.size : 0);
    const x = Object.fromEntries(Object.entries(base).map(([name, rows]) => [name, rows.map((row) => row.map(value))]));
    x.q[ROW][LANE] = state.outlier;
    return { ...x, scale: D ** -0.5 };
  };

  const run = (q, k, x, scale) => {
    const scores = q.map((row) => k.map((key) => attention.dot(row, key) * scale));
    return { scores, out: scores.map((row) => average(row, x.v)) };
  };
  // As attention.whole, in loops: this is done for five versions of the inputs while the reader drags.
  const average = (scores, v) => {
    const top = Math.max(...scores),
      out = new Array(D).fill(0);
    let sum = 0;
    scores.forEach((s, j) => {
      const weight = Math.exp(s - top),
        row = v[j];
      sum += weight;
      for (let c = 0; c < D; c += 1) out[c] += weight * row[c];
    });
    return out.map((y) => y / sum);
  };
  const worst = (made, exact) => d3.max(made, (row, i) => d3.max(row, (y, j) => Math.abs(y - exact[i][j])));
  const relative = (made, exact) => {
    let error = 0,
      size = 0;
    made.forEach((row, i) =>
      row.forEach((y, j) => {
        error += (y - exact[i][j]) ** 2;
        size += exact[i][j] ** 2;
      }),
    );
    return Math.sqrt(error / size);
  };

  const schemes = (x) => {
    const signs = quantise.signs(D),
      turned = (m) => m.map((row) => quantise.rotate(row, signs));
    const [rq, rk] = [turned(x.q), turned(x.k)];
    return {
      tensor: ["one scale for the tensor", quantise.rows(x.q, N), quantise.rows(x.k, N), x.q],
      block: [`one scale for ${BLOCK} rows`, quantise.rows(x.q, BLOCK), quantise.rows(x.k, BLOCK), x.q],
      rotated: ["rotated, one scale", quantise.rows(rq, N), quantise.rows(rk, N), rq],
      both: [`rotated, one for ${BLOCK} rows`, quantise.rows(rq, BLOCK), quantise.rows(rk, BLOCK), rq],
    };
  };

  const drawRow = (plot, state, before, after, figure) => {
    const size = { ...explore.svg(plot, 230, "A row before and after rounding to e4m3"), left: 44, right: 8 };
    const top = d3.max([...before, ...after, 1], Math.abs) * 1.15;
    const x = d3.scaleLinear([-1, D], [size.left, size.width - 8]),
      y = d3.scaleLinear([-top, top], [196, 8]);
    explore.axes(size.svg, x, y, size, ["lane", "value"], [(v) => v, d3.format("~g")]);
    before.forEach((value, i) => {
      size.svg
        .append("line")
        .attr("x1", x(i))
        .attr("x2", x(i))
        .attr("y1", y(0))
        .attr("y2", y(value))
        .attr("stroke", "var(--grey)");
      size.svg.append("circle").attr("cx", x(i)).attr("cy", y(value)).attr("r", 3).attr("fill", "var(--tiled)");
      size.svg
        .append("circle")
        .attr("cx", x(i))
        .attr("cy", y(after[i]))
        .attr("r", 4.5)
        .attr("fill", "none")
        .attr("stroke", "var(--standard)");
    });
    if (state.scheme === "rotated" || state.scheme === "both") return;
    const grip = size.svg
      .append("circle")
      .attr("class", "grip")
      .attr("cx", x(LANE))
      .attr("cy", y(before[LANE]))
      .attr("r", 13)
      .attr("fill", "var(--lit)")
      .attr("fill-opacity", 0.35)
      .attr("stroke", "var(--text)")
      .attr("stroke-dasharray", "3 2")
      .style("cursor", "ns-resize")
      .style("touch-action", "none");
    // The scale stays as it was when the drag began, and the circle is moved; the figure is drawn at the end of it.
    grip.call(
      d3
        .drag()
        .on("drag", (event) => {
          state.outlier = Math.round(Math.min(60, Math.max(0, y.invert(event.y))) * 2) / 2;
          grip.attr("cy", y(state.outlier));
        })
        .on("end", () => figure.draw()),
    );
  };

  explore.figure({
    name: "fp8",
    title: "FP8: outliers, scales and rotation",
    see:
      "e4m3 keeps three bits after the first, so a large number has a large error, which a few outliers bring " +
      "into the scores; a scale for each block changes " +
      "little, and a rotation, which changes no product of Q and K, spreads an outlier over all lanes: the " +
      "largest error falls, and that of the output.",
    sourcesTitle: "The lines that do it, this page's own",
    controls: [
      {
        name: "scheme",
        label: "row shown",
        choices: [
          ["tensor", "one scale for the tensor"],
          ["block", "a scale for each block of rows"],
          ["rotated", "rotated, one scale"],
          ["both", "rotated, a scale for each block"],
        ],
        value: "tensor",
      },
      { name: "outlier", label: "outlier in the row", range: [0, 60, 0.5], value: 12 },
      { name: "share", label: "share of outliers elsewhere", range: [0, 4, 0.25], value: 2, show: (v) => `${v}%` },
      { name: "size", label: "their standard deviation", range: [1, 40], value: 10 },
    ],
    draw(state, plot, figure) {
      const x = makeInputs(state),
        exact = run(x.q, x.k, x, x.scale),
        all = schemes(x);
      const [, q, , before] = all[state.scheme];
      explore.note(plot, `Row ${ROW} of Q, ${D} lanes. Drag the dashed circle, or move the slider.`);
      drawRow(plot, state, before[ROW], q[ROW], figure);
      explore.legend(plot, [
        ["before", "var(--tiled)"],
        ["after e4m3 (ring)", "var(--standard)"],
      ]);
      const errors = {};
      const rows = Object.entries(all).map(([name, [text, qq, kk, was]]) => {
        const made = run(qq, kk, x, x.scale);
        errors[name] = {
          q: relative(qq, was),
          scores: relative(made.scores, exact.scores),
          out: relative(made.out, exact.out),
          worst: worst(made.scores, exact.scores),
        };
        return [
          text,
          ...["q", "scores", "out"].map((each) => `${digits(100 * errors[name][each], 3)}%`),
          digits(errors[name].worst, 3),
        ];
      });
      explore.table(
        plot,
        `Relative error (root mean square) of ${N} queries and keys, head_dim ${D}; V and P are not rounded`,
        ["Q and K in e4m3", "Q", "scores", "output", "largest error of a score"],
        rows,
        Object.keys(all).indexOf(state.scheme),
      );
      const signs = quantise.signs(D),
        turned = x.k.map((key) => quantise.rotate(key, signs));
      const rotatedScore = attention.dot(quantise.rotate(x.q[ROW], signs), turned[3]),
        score = attention.dot(x.q[ROW], x.k[3]);
      explore.note(
        plot,
        `The rotation changes no score: ${digits(score, 12)} before, ${digits(rotatedScore, 12)} after, ` +
          `by ${D * Math.log2(D)} additions a row instead of ${D * D} products.`,
      );
      return { errors, inputs: x, signs, score, rotatedScore };
    },
  });
}
