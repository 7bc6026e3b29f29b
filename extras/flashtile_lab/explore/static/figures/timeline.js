"use strict";
/* Figure 7: a run of the Hopper forward in the emulator, drawn over time. */
{
  const { data, element, replay, integer } = explore;
  const { timeline } = data;
  const COLOURS = {
    wait: "var(--skip)",
    product_wait: "var(--skip)",
    store_wait: "var(--skip)",
    arrive: "var(--fourth)",
    expect: "var(--fourth)",
    load: "var(--standard)",
    store: "var(--fifth)",
    product: "var(--tiled)",
    exp: "var(--third)",
  };
  const SAYS = {
    wait: (e, run) => `waits for phase ${e.b} of ${run.barriers[e.a][0]}`,
    arrive: (e, run) => `arrives at ${run.barriers[e.a][0]}`,
    expect: (e, run) => `announces ${e.b} bytes at ${run.barriers[e.a][0]}`,
    load: (e, run) => `starts a copy of ${e.b} bytes that signals ${run.barriers[e.a][0]}`,
    store: (e) => `starts a copy of ${e.b} bytes of output`,
    product: (e) => `starts a product ${e.b ? "P V" : "Q K^T"}, ${integer(e.a)} FLOPs`,
    product_wait: (e) => `waits until at most ${e.a} products are in flight`,
    store_wait: (e) => `waits until at most ${e.a} stores are in flight`,
    exp: (e) => `computes ${integer(e.a)} exponentials`,
  };
  const VARIANTS = [
    ["chosen", "flashtile's choice", "chosen", {}],
    ["noTile", "tiles one after the other", "no tile overlap", {}],
    ["oneStage", "one stage", "one stage", {}],
    ["eager", "no overlap in a warpgroup", "chosen", { eager: true }],
    ["merged", "no warp specialisation", "chosen", { merged: true }],
  ];
  const lines = (key) => data.kernel[key];

  const roleNames = (run) => run.roles.map((name, i) => (name === "consumer" ? `consumer ${i}` : name));

  // The order of stepping: by time, then by role.
  const orderOf = (played, span) => played.events.slice().sort((a, b) => span(a)[0] - span(b)[0] || a.index - b.index);

  const drawCode = (plot, run, e) => {
    const chain = run.lines[e.line],
      [file, name, line] = chain[0],
      { start, text } = lines(`${file}:${name}`);
    const at = line - start,
      from = Math.max(0, at - 6),
      to = Math.min(text.length, at + 7);
    const pre = element("pre", { tabindex: "0", role: "region", "aria-label": "Source under the cursor" });
    for (let i = from; i < to; i += 1)
      pre.append(
        element(
          "span",
          { className: i === at ? "code-line here" : "code-line" },
          `${String(start + i).padStart(4)}  ${text[i]}`,
        ),
      );
    plot.append(element("p", { className: "note" }, element("code", {}, `${file}, ${name}`), ":"), pre);
    const inner = chain
      .slice(1)
      .map(([f, n, l]) => `${f}:${l} ${n}: ${lines(`${f}:${n}`).text[l - lines(`${f}:${n}`).start].trim()}`);
    if (inner.length)
      plot.append(
        element("pre", { tabindex: "0", role: "region", "aria-label": "Called from there" }, inner.join("\n")),
      );
    return { file, name, line, text: text[at].trim() };
  };

  const drawRows = (plot, run, played, span, order, state, figure) => {
    const names = roleNames(run),
      held = replay.buffers(run, played, span);
    const rows = [
      ...names.filter((n) => n !== "scheduler"),
      "copies in",
      "copies out",
      "tensor cores",
      "exponentials",
      ...held.map((each) => `${each.name} full`),
    ];
    const height = rows.length * 20 + 26,
      { svg, width } = explore.svg(plot, height, "Timeline of roles, engines and buffers");
    const left = Math.min(112, width * 0.3),
      end = d3.max(played.events, (e) => span(e)[1]);
    const current = order[state.step],
      shown = end / 2 ** state.zoom;
    const from = Math.min(end - shown, Math.max(0, span(current)[0] - shown / 2));
    const x = d3.scaleLinear([from, from + shown], [left, width - 6]);
    svg
      .append("clipPath")
      .attr("id", "timeline-clip")
      .append("rect")
      .attr("x", left)
      .attr("width", width - 6 - left)
      .attr("height", height);
    const inside = svg.append("g").attr("clip-path", "url(#timeline-clip)");
    rows.forEach((name, i) => {
      svg
        .append("text")
        .attr("x", left - 6)
        .attr("y", i * 20 + 14)
        .attr("text-anchor", "end")
        .text(name);
      svg
        .append("line")
        .attr("x1", left)
        .attr("x2", width - 6)
        .attr("y1", i * 20 + 19.5)
        .attr("y2", i * 20 + 19.5)
        .attr("stroke", "var(--line)");
    });
    const box = (row, a, b, colour, e) => {
      const rect = inside
        .append("rect")
        .attr("x", x(a))
        .attr("y", rows.indexOf(row) * 20 + 3)
        .attr("height", 14)
        .attr("width", Math.max(1.5, x(b) - x(a) - 0.5))
        .attr("fill", colour);
      if (!e) return;
      if (e === current) rect.attr("stroke", "var(--text)").attr("stroke-width", 2);
      rect.style("cursor", "pointer").on("click", () => {
        figure.state.step = order.indexOf(e);
        figure.draw();
      });
      rect.append("title").text(`${names[e.role]} ${SAYS[e.op](e, run)}`);
    };
    for (const e of order) {
      if (names[e.role] === "scheduler") continue;
      const [a, b] = span(e),
        engine = { load: "copies in", store: "copies out", product: "tensor cores", exp: "exponentials" }[e.op];
      // A role is busy with an asynchronous operation only while it starts it.
      box(
        names[e.role],
        a,
        state.axis === "cycles" && e.issued !== undefined ? e.issued : e.op === "exp" || !engine ? b : a,
        COLOURS[e.op],
        e,
      );
      if (engine)
        box(
          engine,
          state.axis === "cycles" ? e.busyFrom : a,
          b,
          e.op === "product" ? (e.role ? "var(--edge)" : "var(--tiled)") : COLOURS[e.op],
          e,
        );
    }
    for (const each of held) for (const [a, b] of each.held) box(`${each.name} full`, a, b ?? end, "var(--grey)");
    inside
      .append("line")
      .attr("x1", x(span(current)[0]))
      .attr("x2", x(span(current)[0]))
      .attr("y1", 0)
      .attr("y2", rows.length * 20)
      .attr("stroke", "var(--bad)")
      .attr("stroke-width", 1.5);
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${rows.length * 20})`)
      .call(
        d3
          .axisBottom(x)
          .ticks(width < 420 ? 3 : 8)
          .tickFormat((v) => integer(v)),
      );
  };

  // When the tensor cores of each kernel work, all on one scale of cycles.
  const drawStrips = (plot, all, current) => {
    const { svg, width } = explore.svg(plot, all.length * 22 + 22, "Tensor cores of each kernel over time");
    const left = Math.min(190, width * 0.46),
      x = d3.scaleLinear([0, d3.max(all, (each) => each.played.cycles)], [left, width - 6]);
    all.forEach(({ name, text, played }, i) => {
      const y = i * 22;
      const label = svg
        .append("text")
        .attr("x", left - 8)
        .attr("y", y + 15)
        .attr("text-anchor", "end")
        .text(text);
      if (name === current) label.attr("font-weight", 700);
      svg
        .append("rect")
        .attr("x", left)
        .attr("y", y + 3)
        .attr("width", x(played.cycles) - left)
        .attr("height", 16)
        .attr("fill", "var(--skip)");
      const busy = played.events.filter((e) => e.op === "product");
      for (const e of busy)
        svg
          .append("rect")
          .attr("x", x(e.busyFrom))
          .attr("y", y + 3)
          .attr("width", Math.max(0.5, x(e.end) - x(e.busyFrom) - 0.3))
          .attr("height", 16)
          .attr("fill", e.role ? "var(--edge)" : "var(--tiled)");
    });
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${all.length * 22})`)
      .call(
        d3
          .axisBottom(x)
          .ticks(width < 420 ? 3 : 8)
          .tickFormat((v) => integer(v)),
      );
  };

  explore.figure({
    name: "timeline",
    title: "Inside a Hopper kernel",
    see:
      "While one warpgroup computes exponentials the tensor cores multiply for the other, and the producer has " +
      "the next " +
      "keys and values in shared memory before anyone asks; take the second stage or the separate producer away, and " +
      "the tensor cores wait.",
    controls: [
      { name: "variant", label: "kernel", choices: VARIANTS.map(([name, text]) => [name, text]), value: "chosen" },
      {
        name: "axis",
        label: "time axis",
        choices: [
          ["cycles", "cycles, replayed"],
          ["turns", "turns, as recorded"],
        ],
        value: "cycles",
      },
      { name: "zoom", label: "zoom", range: [0, 5], value: 2, show: (v) => `${2 ** v} x` },
      {
        name: "bytes",
        label: "copy rate",
        range: [4, 64, 2],
        value: replay.RATES.bytes,
        show: (v) => `${v} B a cycle`,
        when: (s) => s.axis === "cycles",
      },
      {
        name: "latency",
        label: "copy latency",
        range: [0, 2000, 50],
        value: replay.RATES.latency,
        show: (v) => `${v} cycles`,
        when: (s) => s.axis === "cycles",
      },
      {
        name: "step",
        label: "event",
        stepper: true,
        range: () => [0, timeline.runs.chosen.events.length - 1],
        value: 90,
        show: (v) => `${v + 1} of ${timeline.runs.chosen.events.length}`,
      },
    ],
    draw(state, plot, figure) {
      const rates = { ...replay.RATES, bytes: state.bytes, latency: state.latency };
      const all = VARIANTS.map(([name, text, key, options]) => ({
        name,
        text,
        run: timeline.runs[key],
        played: replay.play(timeline.runs[key], rates, options),
      }));
      const { run, played } = all.find((each) => each.name === state.variant);
      const span = state.axis === "cycles" ? (e) => [e.start, e.end] : (e) => [e.first, e.last];
      const order = orderOf(played, span),
        current = order[Math.min(state.step, order.length - 1)];
      drawRows(plot, run, played, span, order, state, figure);
      explore.legend(plot, [
        ["waits", COLOURS.wait],
        ["arrives", COLOURS.arrive],
        ["copies in", COLOURS.load],
        ["copies out", COLOURS.store],
        ["products of consumer 0", "var(--tiled)"],
        ["of consumer 1", "var(--edge)"],
        ["exponentials", COLOURS.exp],
        ["buffer full", "var(--grey)"],
      ]);
      plot.append(
        element(
          "p",
          { "aria-live": "polite" },
          element("strong", {}, `${roleNames(run)[current.role]} `),
          `${SAYS[current.op](current, run)}, ` +
            (state.axis === "cycles"
              ? `cycles ${Math.round(current.start)} to ${Math.round(current.end)}.`
              : `turns ${current.first} to ${current.last}.`),
        ),
      );
      const code = drawCode(plot, run, current);
      const base = all[0].played.cycles;
      explore.note(plot, "The tensor cores of the same work, with one thing taken away, in replayed cycles:");
      drawStrips(plot, all, state.variant);
      explore.table(
        plot,
        "The same work, with one thing taken away",
        ["kernel", "cycles", "time", "tensor cores busy", "exponentials busy"],
        all.map((each) => [
          each.text,
          integer(each.played.cycles),
          `${(each.played.cycles / base).toFixed(2)} x`,
          `${(100 * each.played.tensor).toFixed(1)}%`,
          `${(100 * each.played.sfu).toFixed(1)}%`,
        ]),
        all.findIndex((each) => each.name === state.variant),
      );
      explore.note(
        plot,
        `Recorded: flashtile's forward kernel (${run.config}), one head of ${timeline.seqlen} tokens, head_dim ` +
          `${timeline.head_dim}, one multiprocessor, in the emulator of ` +
          "flashtile's tests. Events, their order in each role, barriers " +
          `and lines are the run's. The emulator has no clock, so "turns" counts its events; ` +
          `"cycles" replays them at ${rates.flops} FLOPs and ${rates.exps} exponentials a cycle, ` +
          `${rates.issue} cycles to start anything, and the copies' rate and latency above, and leaves other ` +
          "arithmetic out, so that what hides the end of a tile does not show: a model, not a measurement. The " +
          "second and third kernels are runs of their own; in " +
          "the fourth every product is waited for where it starts, and in the last the " +
          "producer's and scheduler's events happen in the first consumer's stream, in the recorded order: " +
          "replays of the first run, not kernels of flashtile.",
      );
      return {
        variant: state.variant,
        step: state.step,
        code,
        op: current.op,
        role: roleNames(run)[current.role],
        cycles: Object.fromEntries(all.map((each) => [each.name, each.played.cycles])),
        tensor: Object.fromEntries(all.map((each) => [each.name, each.played.tensor])),
      };
    },
  });
}
