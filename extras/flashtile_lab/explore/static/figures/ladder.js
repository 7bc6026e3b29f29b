"use strict";
/* Figure 9: saved rows of every attention, and beside them what the papers publish. */
{
  const { data, element, length } = explore;
  const NAMES = {
    "flashtile-hopper": ["flashtile, hopper", "var(--tiled)", ""],
    "flashtile-portable": ["flashtile, portable", "var(--third)", ""],
    fa3: ["FA3", "var(--standard)", "6 3"],
    cudnn: ["cuDNN", "var(--fourth)", "6 3"],
    fa2: ["FA2", "var(--fifth)", "6 3"],
    eager: ["standard", "var(--grey)", "2 3"],
  };
  // What the papers' own text states; method, GPU, TFLOPS, share of the peak, where, and how
  // many times the peak of 16 bits theirs is. A share that is not stated is computed.
  const PUBLISHED = [
    ["FA1", "A100", null, "25-40%", "FA2 paper, abstract"],
    ["FA2, attention", "A100", null, "50-73%", "FA2 paper, abstract"],
    ["FA2, training a GPT", "A100", 225, "72%", "FA2 paper, abstract"],
    ["FA2", "H100", null, "35%", "FA3 paper, abstract"],
    ["FA3, no pipelining (ablation)", "H100", 582, null, "FA3 paper, 4.2"],
    ["FA3, no warp specialisation (ablation)", "H100", 570, null, "FA3 paper, 4.2"],
    ["FA3, all (ablation)", "H100", 661, null, "FA3 paper, 4.2"],
    ["FA3, best 16-bit forward", "H100", 740, "75%", "FA3 paper, abstract"],
    ["FA3, FP8, close to", "H100", 1200, null, "FA3 paper, abstract", 2],
  ];
  const device = Object.keys(data.devices).find((name) => data.ladder.device.includes(name));
  const peak = data.devices[device].peak_flops_per_s / 1e12;

  explore.figure({
    name: "ladder",
    title: "The ladder of speed",
    see:
      "Each generation comes nearer to the chip's peak, and short sequences, causal masks and the backward are " +
      "where it is hardest; our rows and published " +
      "figures are apart, since they are of different machines.",
    controls: [
      { name: "direction", label: "direction", choices: ["forward", "backward"], value: "forward" },
      { name: "d", label: "head_dim", choices: [64, 128, 256], value: 128 },
      { name: "causal", label: "causal", check: true, value: false },
      {
        name: "unit",
        label: "axis",
        choices: [
          ["tflops", "TFLOPS"],
          ["share", "share of the peak"],
        ],
        value: "tflops",
      },
    ],
    draw(state, plot) {
      const cells = data.ladder.cells.filter(
        ([direction, d, causal]) => direction === state.direction && d === state.d && causal === state.causal,
      );
      const value = (tflops) => (state.unit === "share" ? (100 * tflops) / peak : tflops);
      const top = (state.unit === "share" ? 100 : peak) * 1.12;
      const shown = state.unit === "share" ? (v) => `${v}%` : (v) => String(v);
      const size = { ...explore.svg(plot, 330, "Speed by length"), left: 54, right: 12 };
      const lengths = cells.map((cell) => cell[3]);
      const x = d3.scaleLog([d3.min(lengths), d3.max(lengths)], [size.left, size.width - 14]).base(2),
        y = d3.scaleLinear([0, top], [296, 8]);
      explore.axes(
        size.svg,
        x,
        y,
        size,
        ["length", state.unit === "share" ? `share of ${peak.toFixed(0)} TFLOPS` : "TFLOPS"],
        [length, shown],
        { x: lengths },
      );
      size.svg
        .append("line")
        .attr("x1", size.left)
        .attr("x2", size.width - 14)
        .attr("y1", y(value(peak)))
        .attr("y2", y(value(peak)))
        .attr("stroke", "var(--bad)")
        .attr("stroke-dasharray", "2 3");
      const present = Object.entries(NAMES).filter(([name]) => cells.some((cell) => cell[5][name] !== undefined));
      for (const [name, [, colour, dash]] of present) {
        const points = cells
          .filter((cell) => cell[5][name] !== undefined)
          .map((cell) => [cell[3], value(cell[5][name])]);
        size.svg
          .append("path")
          .attr(
            "d",
            d3.line(
              (p) => x(p[0]),
              (p) => y(p[1]),
            )(points),
          )
          .attr("fill", "none")
          .attr("stroke", colour)
          .attr("stroke-width", 2.2)
          .attr("stroke-dasharray", dash);
        points.forEach((p) =>
          size.svg.append("circle").attr("cx", x(p[0])).attr("cy", y(p[1])).attr("r", 3.2).attr("fill", colour),
        );
      }
      explore.legend(plot, [
        ...present.map(([, [text, colour]]) => [text, colour]),
        [`peak of the ${device}, 16 bits`, "var(--bad)"],
      ]);
      const places = state.unit === "share" ? 1 : 0;
      const mark = state.unit === "share" ? "%" : "";
      explore.table(
        plot,
        `Saved rows: ${data.ladder.device}, bf16, ` +
          `${state.unit === "share" ? `% of ${peak.toFixed(1)} TFLOPS` : "TFLOPS"}; each at its last run, ` +
          "ours of the day given",
        ["length", ...present.map(([, [text]]) => text), "day"],
        cells.map((cell) => [
          length(cell[3]),
          ...present.map(([name]) =>
            cell[5][name] === undefined ? "-" : `${value(cell[5][name]).toFixed(places)}${mark}`,
          ),
          `${cell[4].slice(0, 4)}-${cell[4].slice(4, 6)}-${cell[4].slice(6)}`,
        ]),
      );
      plot.append(element("h3", {}, "Published, as the papers' text states it"));
      explore.note(
        plot,
        "Of other machines, not measured by us. FA2 paper: arXiv 2307.08691; FA3 paper: arXiv 2407.08608, which " +
          "gives cuDNN's speed in charts alone, not read off here. Where a paper gives no share, it is that of the " +
          "chip's dense peak, twice as high in FP8.",
      );
      explore.table(
        plot,
        "Published",
        ["method", "GPU", "TFLOPS", "share of the peak", "where"],
        PUBLISHED.map(([method, gpu, tflops, share, where, faster = 1]) => [
          method,
          gpu,
          tflops === null ? "-" : String(tflops),
          share ?? `${((1e14 * tflops) / (faster * data.devices[gpu].peak_flops_per_s)).toFixed(1)}%`,
          where,
        ]),
      );
      return { rows: cells.map((cell) => [cell[3], cell[5]]), peak };
    },
  });
}
