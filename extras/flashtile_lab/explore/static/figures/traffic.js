"use strict";
/* Figure 3: bytes moved, by length and loop order, and the roofline. */
{
  const { model, bytes, length } = explore;
  const LINES = [
    ["standard", "standard", "var(--standard)"],
    ["kvOutside", "tiled, K and V outside (FA1)", "var(--fourth)"],
    ["qOutside", "tiled, Q outside (FA2, flashtile)", "var(--tiled)"],
    ["compulsory", "each operand once", "var(--third)"],
  ];

  const bytesOf = (s, state) => ({
    standard: model.standardTraffic(s).own,
    kvOutside: model.tiledTraffic(s, state.blockQ, state.blockK, "kv-outside").total,
    qOutside: model.tiledTraffic(s, state.blockQ, state.blockK, "q-outside").total,
    compulsory: model.compulsoryTraffic(s),
  });

  const drawTraffic = (pane, state, shape) => {
    const size = { ...explore.svg(pane, 290, "HBM bytes by length"), left: 62, right: 12 };
    const lengths = d3.range(9, 18).map((x) => 2 ** x),
      rows = lengths.map((n) => [n, bytesOf(shape(n), state)]);
    const x = d3.scaleLog([512, 131072], [size.left, size.width - 12]).base(2);
    const values = rows.flatMap(([, row]) => Object.values(row));
    const y = d3.scaleLog([d3.min(values) / 2, d3.max(values) * 2], [256, 10]);
    const powers = d3
      .range(3, 18)
      .map((p) => 10 ** p)
      .filter((p) => p >= y.domain()[0] && p <= y.domain()[1]);
    explore.axes(
      size.svg,
      x,
      y,
      size,
      ["length", "HBM bytes of one head"],
      [length, (v) => bytes(v).replace(/\.0+ /, " ")],
      { x: lengths, y: powers },
    );
    for (const [name, , colour] of LINES) {
      size.svg
        .append("path")
        .attr("fill", "none")
        .attr("stroke", colour)
        .attr("stroke-width", 2.2)
        .attr(
          "d",
          d3.line(
            (row) => x(row[0]),
            (row) => y(row[1][name]),
          )(rows),
        );
      size.svg
        .append("circle")
        .attr("r", 4.5)
        .attr("fill", colour)
        .attr("cx", x(2 ** state.log))
        .attr("cy", y(bytesOf(shape(2 ** state.log), state)[name]));
    }
  };

  const drawRoofline = (pane, state, moved, flops) => {
    const size = { ...explore.svg(pane, 290, "Roofline of the GPU with each method's point"), left: 62, right: 12 };
    const device = model.devices[state.device];
    const x = d3.scaleLog([1, 65536], [size.left, size.width - 12]).base(2),
      peak = device.peak_flops_per_s / 1e12;
    const y = d3.scaleLog([1, peak * 2], [256, 10]);
    const ticks = d3.range(0, 17, 2).map((p) => 2 ** p);
    explore.axes(size.svg, x, y, size, ["FLOP per byte", "attainable TFLOPS"], [length, (v) => explore.integer(v)], {
      x: ticks,
      y: [1, 10, 100, 1000].filter((v) => v <= peak * 2),
    });
    const ridge = device.peak_flops_per_s / device.hbm_bytes_per_s;
    const roof = [
      [1, device.hbm_bytes_per_s / 1e12],
      [ridge, peak],
      [65536, peak],
    ];
    size.svg
      .append("path")
      .attr("fill", "none")
      .attr("stroke", "var(--grey)")
      .attr("stroke-width", 2)
      .attr(
        "d",
        d3.line(
          (p) => x(p[0]),
          (p) => y(Math.max(1, p[1])),
        )(roof),
      );
    size.svg
      .append("text")
      .attr("class", "soft")
      .attr("x", x(ridge) + 4)
      .attr("y", y(peak) + 16)
      .text(`ridge ${Math.round(ridge)}`);
    for (const [name, , colour] of LINES) {
      const point = model.roofline(flops, moved[name], state.device);
      size.svg
        .append("circle")
        .attr("r", 5.5)
        .attr("fill", colour)
        .attr("cx", x(Math.min(65536, Math.max(1, point.intensity))))
        .attr("cy", y(Math.max(1, point.attainable / 1e12)));
    }
  };

  explore.figure({
    name: "traffic",
    title: "Traffic and the roofline",
    see:
      "The order with Q outside leaves the output on chip and moves the fewest bytes, fewer the taller its " +
      "tiles, which the on-chip memory limits; " +
      "what a cache catches moves its point on, towards the flat part of the roof.",
    controls: [
      { name: "log", label: "length", range: [9, 17], value: 13, show: (v) => length(2 ** v) },
      { name: "d", label: "head_dim", choices: [64, 128, 256], value: 128 },
      { name: "blockQ", label: "rows of a tile", choices: [16, 32, 64, 128, 192, 256], value: 128 },
      { name: "blockK", label: "keys of a tile", choices: [16, 32, 64, 128, 256], value: 128 },
      { name: "dtype", label: "dtype", choices: ["bfloat16", "float32"], value: "bfloat16" },
      { name: "device", label: "GPU", choices: Object.keys(model.devices), value: "H100" },
      { name: "sram", label: "on-chip memory", range: [32, 256, 1], value: 227, show: (v) => `${v} KiB a block` },
      { name: "causal", label: "causal", check: true, value: false },
    ],
    draw(state, plot) {
      const size = model.dtypeBytes[state.dtype];
      const shape = (n) => ({ n, m: n, d: state.d, problems: 1, bytes: size, causal: state.causal });
      const s = shape(2 ** state.log),
        moved = bytesOf(s, state),
        flops = model.attentionFlops(s).forward;
      const panes = plot.appendChild(explore.element("div", { className: "panes" }));
      const [left, right] = [0, 1].map(() => panes.appendChild(explore.element("div")));
      explore.legend(
        plot,
        LINES.map(([, text, colour]) => [text, colour]),
      );
      drawTraffic(left, state, shape);
      drawRoofline(right, state, moved, flops);
      const points = Object.fromEntries(
        LINES.map(([name]) => [name, model.roofline(flops, moved[name], state.device)]),
      );
      explore.table(
        plot,
        `One head at ${length(s.n)} tokens on a ${state.device}`,
        ["method", "HBM bytes", "FLOP/byte", "bound by", "least time"],
        LINES.map(([name, text]) => [
          text,
          bytes(moved[name]),
          points[name].intensity.toFixed(1),
          points[name].bound,
          explore.seconds(points[name].time),
        ]),
      );
      const tile = model.tileMemory(state.blockQ, state.blockK, state.d, size),
        fits = tile.total <= state.sram * 1024,
        best = model.fittingTile(state.sram * 1024, state.d, size);
      plot.append(
        explore.element(
          "p",
          { className: "note" },
          `A tile takes ${(tile.total / 1024).toFixed(2)} KiB on chip (Q ${tile.q / 1024}, K ${tile.k / 1024}, ` +
            `V ${tile.v / 1024}, ` +
            `P ${tile.probs / 1024}, accumulator ${tile.acc / 1024}, statistics ${tile.stats / 1024}): it `,
          explore.element("span", { className: fits ? "good" : "bad" }, fits ? "fits" : "does not fit"),
          ` into ${state.sram} KiB. ` +
            (best
              ? `Of tiles with sides from 16 to 256, ${best.blockQ} x ${best.blockK} fits and moves the fewest bytes. `
              : "No tile with sides from 16 to 256 fits. ") +
            `A block of an A100 may have ${model.devices.A100.on_chip_bytes / 1024}, of an H100 ` +
            `${model.devices.H100.on_chip_bytes / 1024}. ` +
            "The peak of the roof is that of 16-bit elements; nothing is taken to stay in a cache.",
        ),
      );
      return { moved, flops, points, tile, fits, best };
    },
  });
}
