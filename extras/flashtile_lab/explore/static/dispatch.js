"use strict";
/* Which backend runs a call: flashtile.call.backend.Capabilities as data, and its rules. The declarations, labels
   and tiles
   come from Python when the page is made; a test compares the text with what flashtile explain prints. */

explore.dispatch = (() => {
  const { backends, features, tiles } = explore.data.explain;

  // Whether a call of the form uses a feature, by the names of FEATURES; the form offers no others. A window with keys
  // on both sides has a right bound too, which is what "causal" asks for.
  const used = {
    causal: (c) => c.mask !== "full",
    window: (c) => c.mask.includes("window"),
    grouped_heads: (c) => c.grouped,
    varlen: (c) => c.varlen,
    softcap: (c) => c.softcap,
    alibi: (c) => c.alibi,
    mask: (c) => c.attn_mask,
    bias: (c) => c.attn_bias,
    bias_grad: (c) => c.attn_bias && c.grad,
    sinks: (c) => c.sinks,
    dropout: (c) => c.dropout,
    deterministic: (c) => c.deterministic,
  };
  const less = (a, b) => a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
  const deviceReasons = (caps, c) => {
    const type = c.device === "cpu" ? "cpu" : "cuda";
    if (!caps.device_types.includes(type))
      return [`needs ${caps.device_types.join(" or ")} tensors, these are on ${type}`];
    if (type === "cpu") return [];
    const have = c.device.split(".").map(Number),
      low = caps.min_compute_capability,
      high = caps.max_compute_capability;
    if ((low && less(have, low)) || (high && less(high, have))) {
      const more = high && low && high.join() === low.join() ? "" : " or later";
      return [`needs compute capability ${low ? low.join(".") : ""}${more}, this device is ${have.join(".")}`];
    }
    return [];
  };
  const shapeReasons = (caps, c) => {
    const why = caps.dtypes.includes(c.dtype) ? [] : [`no ${c.dtype}`];
    for (const name of ["head_dim", "head_dim_v"]) {
      if (caps.max_head_dim !== null && c.head_dim > caps.max_head_dim)
        why.push(`${name} is ${c.head_dim}, at most ${caps.max_head_dim} is supported`);
      if (c.head_dim % caps.head_dim_multiple)
        why.push(`${name} is ${c.head_dim}, must be a multiple of ${caps.head_dim_multiple}`);
    }
    return why;
  };
  const reasons = (caps, c, direction) => {
    if (caps === null) return [`has no ${direction}`];
    return [
      ...deviceReasons(caps, c),
      ...shapeReasons(caps, c),
      ...features.filter((f) => !caps[f.name] && used[f.name]?.(c)).map((f) => `no ${f.label}`),
    ];
  };

  // What the choice of tiles looks at, by the names of the table's axes.
  const facts = {
    pairs: (c) => c.attn_mask || c.attn_bias,
    special: (c) => c.softcap || c.dropout,
    added: (c) => c.attn_mask || c.alibi || c.attn_bias,
    featured: (c) => c.softcap || c.alibi || c.attn_bias || c.attn_mask || c.dropout,
    bias: (c) => c.attn_bias,
  };
  const describe = (backend, direction, c) => {
    const table = tiles[`${backend} ${direction}`];
    let index = 0;
    for (const [name, values] of table.axes) {
      const place = values.indexOf(facts[name] ? facts[name](c) : c[name]);
      if (place < 0) return "";
      index = index * values.length + place;
    }
    return table.texts[parseInt(table.codes.slice(2 * index, 2 * index + 2), 36)];
  };

  const explain = (c) => {
    const found = [];
    for (const direction of c.grad ? ["forward", "backward"] : ["forward"]) {
      const against = Object.fromEntries(
        Object.entries(backends).map(([name, each]) => [name, reasons(each[direction], c, direction)]),
      );
      const chosen = Object.keys(backends).find((name) => against[name].length === 0) ?? null;
      const others = Object.entries(against).filter(([name]) => name !== chosen);
      found.push({ direction, chosen, tiles: chosen ? describe(chosen, direction, c) : "", others });
    }
    return found;
  };

  return { explain };
})();
