"use strict";
/* Figure 10: explain, as a form. */
{
  const { dispatch, element, data } = explore;
  const { form } = data.explain;
  const DEVICES = { cpu: "CPU", "8.0": "A100 (8.0)", "9.0": "H100, H200 (9.0)", "10.0": "B200 (10.0)" };
  const check = (name, label) => ({ name, label, check: true, value: false });

  const command = (c) => {
    const words = [
      "flashtile explain",
      `--seqlen ${c.seqlen}`,
      `--head-dim ${c.head_dim}`,
      `--dtype ${c.dtype}`,
      c.device === "cpu" ? "--device cpu" : `--arch ${c.device}`,
    ];
    const masks = { causal: "--causal", window: "--window 255 255", "causal window": "--window 255 0" };
    if (masks[c.mask]) words.push(masks[c.mask]);
    const flags = {
      grouped: "--kv-heads 4",
      softcap: "--softcap 30",
      alibi: "--alibi",
      attn_mask: "--mask",
      attn_bias: "--bias",
      sinks: "--sinks",
      dropout: "--dropout 0.1",
      varlen: "--varlen",
      deterministic: "--deterministic",
      grad: "--grad",
    };
    return [
      ...words,
      ...Object.entries(flags)
        .filter(([name]) => c[name])
        .map(([, flag]) => flag),
    ].join(" ");
  };

  explore.figure({
    name: "explain",
    title: "Which backend runs your call, and why",
    see:
      "The fastest backend that declares everything a call needs runs it, and each of the others says what " +
      "it lacks; nothing falls back silently.",
    controls: [
      { name: "device", label: "device", choices: form.device.map((each) => [each, DEVICES[each]]), value: "9.0" },
      { name: "dtype", label: "dtype", choices: form.dtype, value: "bfloat16" },
      { name: "head_dim", label: "head_dim", choices: form.head_dim, value: 128 },
      { name: "seqlen", label: "length", choices: form.seqlen.map((n) => [n, explore.length(n)]), value: 4096 },
      { name: "mask", label: "band", choices: form.mask, value: "causal" },
      check("grad", "gradients"),
      check("grouped", "grouped heads"),
      check("softcap", "softcap"),
      check("alibi", "ALiBi"),
      check("attn_mask", "attn_mask"),
      check("attn_bias", "attn_bias"),
      check("sinks", "sinks"),
      check("dropout", "dropout"),
      check("varlen", "packed sequences"),
      check("deterministic", "deterministic"),
    ],
    draw(state, plot) {
      const found = dispatch.explain(state);
      const lines = [];
      for (const { direction, chosen, tiles, others } of found) {
        lines.push(chosen ? `${direction}: ${chosen}: ${tiles}` : `no backend supports this ${direction}`);
        for (const [name, why] of others)
          lines.push(`  not ${name}: ${why.join("; ") || `could run it too, but ${chosen} was taken`}`);
        plot.append(element("p", {}, `${direction}: `, element("strong", {}, chosen ?? "no backend")));
      }
      plot.append(
        element(
          "pre",
          {
            className: "wrap",
            tabindex: "0",
            role: "region",
            "aria-label": "What explain prints",
            "aria-live": "polite",
          },
          lines.join("\n"),
        ),
      );
      explore.note(plot, "The same in a terminal:");
      plot.append(
        element("pre", { className: "wrap", tabindex: "0", role: "region", "aria-label": "Command" }, command(state)),
      );
      explore.note(
        plot,
        "What the machine lacks that you run on (Triton, a GPU) is not asked here; flashtile explain without " +
          "--arch asks it, and flashtile info lists it.",
      );
      return { lines, command: command(state) };
    },
  });
}
